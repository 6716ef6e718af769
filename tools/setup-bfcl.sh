#!/bin/sh
# Installs the BFCL multi-turn benchmark, V3 (package nvidia-bfcl, module bfcl) and V4 (package bfcl-eval, module
# bfcl_eval), both Apache-2.0 with their data inside, into a private Python environment under the project's
# ignored folder. Nothing outside that folder changes.
#
#   tools/setup-bfcl.sh [FOLDER]          default: .coevolve/bfcl in the project
#
# Idempotent: a finished installation is left alone. To redo it, delete the folder.
# PYTHON=python3.12 tools/setup-bfcl.sh chooses another interpreter (3.10 or newer).
set -eu

project=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
folder=${1:-$project/.coevolve/bfcl}
python=${PYTHON:-python3}
# --no-deps: the package names dozens of model SDKs; the API classes and the checker need only mpmath.
packages="nvidia-bfcl==26.3 bfcl-eval==2026.3.23 mpmath==1.3.0"
stamp="$folder/ready"

fail() { echo "setup-bfcl: $*" >&2; exit 1; }

probe() {
    "$folder/bin/python" -I -c 'import mpmath
import bfcl.eval_checker.multi_turn_eval.multi_turn_checker
import bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker' 2>/dev/null
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$packages" ] && probe; then
    echo "BFCL is ready in $folder"
    exit 0
fi

command -v "$python" >/dev/null 2>&1 || fail "$python not found; install Python 3.10 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
    || fail "$("$python" --version 2>&1) is too old; set PYTHON to Python 3.10 or newer"

mkdir -p "$folder" || fail "cannot make $folder"
rm -f "$stamp"
"$python" -m venv "$folder" \
    || fail "could not make a virtual environment; on Debian or Ubuntu: apt install python3-venv"
# shellcheck disable=SC2086  # the list is split on purpose
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps $packages \
    || fail "pip could not install $packages (is a package index reachable?); run this command again"
probe || fail "the package is installed but does not load; delete $folder and run this command again"
mkdir -p "$folder/root"
printf '%s\n' "$packages" >"$stamp"
echo "BFCL is ready in $folder"
