"""The command line. `main` is the entry point `sglang-pd`; a new command is one line in `COMMANDS` of `app.py`."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Run the command line of this process and end it."""
    try:
        app = importlib.import_module("sglang_pd.cli.app")
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        sys.exit(f"sglang-pd: the command line needs the package {package}: pip install 'sglang-pd[server]'")
    app.main()
