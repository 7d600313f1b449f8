"""The language of transfers: index spaces, manifests, verdicts, plans, messages and rooms. Pure: no I/O, no clock."""
