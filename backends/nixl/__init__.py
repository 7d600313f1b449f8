"""NIXL: its agents, their threads, and what its plug-ins do, behind the common contract."""
