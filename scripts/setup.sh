#!/usr/bin/env bash
# Makes the environment in $VENV: Debian packages, a venv, torch by its pin, then this package, editable, with `dev`.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv} TORCH=${TORCH:-torch==2.13.0}
export PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive

die() { echo "setup: $*" >&2; exit 1; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || die "Python 3.10 or newer is needed, $PYTHON is $("$PYTHON" -V 2>&1 || true). Name another with: make PYTHON=..."

# What wheels link against but do not bring: library -> the Debian package that has it.
missing=()
needs() {
    ldconfig_cache=${ldconfig_cache:-$({ ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null || true)}
    grep -qF "$1 " <<<"$ldconfig_cache" || missing+=("$2")
}
needs libibverbs.so.1 libibverbs1 # mooncake
needs libnuma.so.1 libnuma1       # mooncake
needs libcurl.so.4 libcurl4       # mooncake
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)

if ((${#missing[@]})); then
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        echo "setup: installing Debian packages: ${missing[*]}"
        log=$(mktemp)
        { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 </dev/null \
            || { tail -n 30 "$log" >&2; rm -f "$log"; die "cannot install ${missing[*]}"; }
        rm -f "$log"
    else
        die "these Debian packages are missing: ${missing[*]}. As root: apt-get install ${missing[*]}"
    fi
fi

[[ -x $VENV/bin/python ]] || "$PYTHON" -m venv "$VENV"
pip=("$VENV/bin/python" -m pip install -qq)
echo "setup: installing into $VENV ($("$VENV/bin/python" -V), $TORCH); the first time takes minutes"
"${pip[@]}" "$TORCH"
"${pip[@]}" --editable '.[dev]'
