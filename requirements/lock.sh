#!/bin/bash
# Resolves pyproject.toml (with [dev] and [service]) in a throw-away environment and writes the exact versions found.
# Usage: requirements/lock.sh PYTHON LOCKFILE [EXTRA_INDEX_URL]. TORCH=2.13.0 names the torch release that the lock is for.
set -euo pipefail
python=$1 lock=$2 index=${3:-} torch=${TORCH:-2.13.0}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install ${index:+--extra-index-url "$index"} "torch==$torch" setuptools ".[dev,service]"
# The header's comment lines stay. Local versions (2.13.0+cpu) name a build, not a release: cut. CUDA packages follow from torch's own pins.
{
    grep '^#' "$lock"
    "$folder/venv/bin/python" -m pip freeze --all --exclude pip --exclude wheel --exclude megatron-autotune |
        sed -n 's/^\([A-Za-z0-9._-]*==[^+ ]*\).*$/\1/p' | grep -v -i -E '^(nvidia-(cu|nccl|nv)|cuda-|triton==)' | LC_ALL=C sort -f
} > "$folder/lock.txt"
cp "$folder/lock.txt" "$lock"
