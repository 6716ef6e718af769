#!/bin/sh
# Installs TextWorld (MIT; its interpreter, jericho: GPL-2.0-or-later, run as a process of its own), which makes and
# plays text games offline, into a private Python environment under
# the project's ignored folder. Nothing outside that folder changes. Games are made later, with a seed, when they
# are needed, and kept in its folder `games`.
#
#   tools/setup-textworld.sh [FOLDER]          default: .coevolve/textworld in the project
#
# Idempotent: a finished installation is left alone. To redo it, delete the folder.
# PYTHON=python3.12 tools/setup-textworld.sh chooses another interpreter (3.11 or newer). Linux and macOS.
set -eu

project=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
folder=${1:-$project/.coevolve/textworld}
python=${PYTHON:-python3}
# --no-deps: the game interpreter (jericho) names spacy and its 200 MB, which nothing here imports.
packages="textworld==1.7.0 jericho==3.3.1 numpy==2.4.6 networkx==3.6.1 more-itertools==11.2.1 tatsu==5.8.3
 hashids==1.3.1 mementos==1.3.1 wrapt==2.5.2 termcolor==3.3.0 tqdm==4.70.1 prompt_toolkit==3.0.53 wcwidth==0.9.4"
stamp="$folder/ready"

fail() { echo "setup-textworld: $*" >&2; exit 1; }

probe() {
    "$folder/bin/python" -I -c 'import textworld' 2>/dev/null
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$packages" ] && probe; then
    echo "TextWorld is ready in $folder"
    exit 0
fi

command -v "$python" >/dev/null 2>&1 || fail "$python not found; install Python 3.11 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "$("$python" --version 2>&1) is too old; set PYTHON to Python 3.11 or newer"

mkdir -p "$folder" || fail "cannot make $folder"
rm -f "$stamp"
"$python" -m venv "$folder" \
    || fail "could not make a virtual environment; on Debian or Ubuntu: apt install python3-venv"
# shellcheck disable=SC2086  # the list is split on purpose
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps $packages \
    || fail "pip could not install $packages (is a package index reachable?); run this command again"
probe || fail "the package is installed but does not load; delete $folder and run this command again"
printf '%s\n' "$packages" >"$stamp"
echo "TextWorld is ready in $folder"
