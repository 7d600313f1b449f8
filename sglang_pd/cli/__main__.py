"""`python -m sglang_pd.cli`: the same as `sglang-pd`."""

from sglang_pd.cli import main

main()
