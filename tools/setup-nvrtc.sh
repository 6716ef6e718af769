#!/usr/bin/env bash
# Installs NVIDIA's runtime compiler (a library; no toolkit, driver or card) into .coevolve/cuda, for
# `cargo test --release --test nvrtc`. Prints the line that makes it findable:
#   eval "$(tools/setup-nvrtc.sh)"
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.coevolve/cuda
# 13.0: PTX of a newer compiler is refused by the drivers we run on.
version=13.0.88
[ -x "$venv/bin/pip" ] || python3 -m venv "$venv" >&2
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "nvidia-cuda-nvrtc==$version" >&2
lib=$(dirname "$(find "$PWD/$venv/lib" -name 'libnvrtc.so.13' | head -n 1)")
[ -e "$lib/libnvrtc.so.13" ] || { echo "setup-nvrtc: libnvrtc.so.13 is not in the package" >&2; exit 1; }
# The loader looks for the name without a version too.
ln -sf libnvrtc.so.13 "$lib/libnvrtc.so"
echo "export LD_LIBRARY_PATH=$lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
