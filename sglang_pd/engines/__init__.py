"""Engines: they compute, register regions, and hand over indices. `base` is the contract, the others implement it."""
