"""MORI-IO behind the common contract."""
