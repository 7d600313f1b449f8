"""Which sglang-pd this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Version of the installed package; `unknown` where it runs from a bare folder."""
    try:
        return version("sglang-pd")
    except PackageNotFoundError:
        return "unknown"
