#!/usr/bin/env bash
# Runs every check that is not a test, all of them even if one fails. House rules are tests (tests/test_house_rules.py).
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
bin=$(cd "${VENV:-.venv}/bin" && pwd)
failed=()
check() {
    local name=$1
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}

# Types and import direction are judged on the installed package, not on the folders it is made from.
mkdir -p build
plain=$(mktemp -d build/lint.XXXXXX)
trap 'rm -rf "$root/$plain"' EXIT
in_plain() { (cd "$plain" && PYTHONPATH=. MYPYPATH=. "$@"); }

check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "plain install" scripts/install_plain.sh "$plain"
check "mypy --strict" in_plain "$bin/mypy" --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" \
    --strict -p sglang_pd
# numpy's stubs are written for newer interpreters, so the oldest one is asked only whether every name exists.
check "names exist on Python 3.10" in_plain "$bin/mypy" --config-file= --ignore-missing-imports \
    --cache-dir "$root/.mypy_cache" --python-version 3.10 -p sglang_pd
check "import direction" in_plain "$bin/lint-imports" --no-logo --cache-dir "$root/.import_linter_cache" \
    "$root/pyproject.toml"

if ((${#failed[@]})); then
    printf 'lint: FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "lint: all passed"
