#!/bin/bash
# Resolves pyproject.toml (with [dev] and [service]) as for an empty environment, installs nothing, and writes the versions found.
# Usage: requirements/lock.sh PYTHON LOCKFILE [EXTRA_INDEX_URL]. TORCH=2.13.0 names the torch release that the lock is for.
set -euo pipefail
python=$1 lock=$2 index=${3:-} torch=${TORCH:-2.13.0}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
echo "resolving, which downloads what it must look into" >&2
"$folder/venv/bin/python" -m pip install --quiet --dry-run --ignore-installed --report "$folder/report.json" \
    ${index:+--extra-index-url "$index"} "torch==$torch" ".[dev,service]"

# The header's comment lines stay. A local version (2.13.0+cpu) names a build, not a release: cut. A CUDA build's own packages are
# left out: torch pins them itself, and a CPU or ROCm build has none.
{
    grep '^#' "$lock"
    "$python" - "$folder/report.json" <<'PYTHON'
import json, re, sys

for item in sorted(json.load(open(sys.argv[1]))["install"], key=lambda item: item["metadata"]["name"].lower()):
    name, version = item["metadata"]["name"], item["metadata"]["version"].partition("+")[0]
    if name != "megatron-autotune" and not re.match(r"nvidia-(cu|nccl|nv)|cuda-|triton$", name):
        print(f"{name}=={version}")
PYTHON
} > "$folder/lock.txt"
cp "$folder/lock.txt" "$lock"
