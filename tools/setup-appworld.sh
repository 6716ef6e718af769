#!/bin/sh
# Installs AppWorld (package appworld, Apache-2.0; its code comes packed and may not be passed on unpacked) into a
# private Python environment under the project's ignored folder, and makes nine tasks of our own to try it with.
# Nothing outside that folder changes.
#
#   tools/setup-appworld.sh [FOLDER]          default: .coevolve/appworld in the project
#
# The 750 official tasks need a download: with a network, `FOLDER/bin/appworld download data --root DATA`, then
# env.data=DATA. Idempotent: a finished installation is left alone. To redo it, delete the folder.
# PYTHON=python3.12 tools/setup-appworld.sh chooses another interpreter (3.11 or newer).
set -eu

project=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
folder=${1:-$project/.coevolve/appworld}
python=${PYTHON:-python3}
package="appworld==0.1.3.post1"
stamp="$folder/ready"

fail() { echo "setup-appworld: $*" >&2; exit 1; }

probe() {
    APPWORLD_ROOT="$folder/root" APPWORLD_CACHE="$folder/cache" \
        "$folder/bin/python" -I -c 'import appworld.serve.environment' 2>/dev/null
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$package" ] && probe; then
    echo "AppWorld is ready in $folder"
    exit 0
fi

command -v "$python" >/dev/null 2>&1 || fail "$python not found; install Python 3.11 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "$("$python" --version 2>&1) is too old; set PYTHON to Python 3.11 or newer"

mkdir -p "$folder/root" || fail "cannot make $folder"
rm -f "$stamp"
"$python" -m venv "$folder" \
    || fail "could not make a virtual environment; on Debian or Ubuntu: apt install python3-venv"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$package" \
    || fail "pip could not install $package (is a package index reachable?); run this command again"
APPWORLD_ROOT="$folder/root" APPWORLD_CACHE="$folder/cache" "$folder/bin/appworld" install >/dev/null \
    || fail "the package could not unpack its code; delete $folder and run this command again"
probe || fail "the package is installed but does not load; delete $folder and run this command again"
"$folder/bin/python" -I "$project/tools/workers/appworld_make.py" "$folder/root" >/dev/null \
    || fail "our own tasks could not be made; delete $folder and run this command again"
printf '%s\n' "$package" >"$stamp"
echo "AppWorld is ready in $folder"
