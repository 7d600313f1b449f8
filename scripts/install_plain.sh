#!/usr/bin/env bash
# Installs the package plainly, without dependencies, into folder $1: what a user gets, in a form that tools can walk
# (the editable install works by an import hook, which mypy and import-linter do not follow).
# Builds from a copy, so that no stale build folder and no concurrent build gets in.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$1
python=${VENV:-.venv}/bin/python
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
find pyproject.toml README.md LICENSE protocol backends sglang_pd \
    -name __pycache__ -prune -o -type f -print0 | xargs -0 cp --parents -t "$copy"
PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install --quiet \
    --no-deps --no-build-isolation --no-compile --upgrade --target "$target" "$copy"
