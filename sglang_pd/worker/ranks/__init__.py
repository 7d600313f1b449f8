"""The ranks of an instance: what one does with its memory and its backend, and how its control reaches it."""
