"""Mooncake's transfer engine behind the common contract."""
