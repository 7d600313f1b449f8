"""Processes of a deployment: a worker in this one, or a whole 1P1D started, watched and ended as a group."""
