#!/usr/bin/env bash
# What the planner says of GPUs against what runs on them take: sets up an environment and runs bench/planner_gpu.py.
#
#   bench/gpu.sh [FOLDER [ARGUMENTS OF planner_gpu.py]]
#
# FOLDER gets the table (planner-gpu-DATE.md) and the figures (planner-gpu-DATE.json); bench/results otherwise.
# VENV: the environment's folder (.venv-gpu otherwise; used as it is where it exists). TORCH_INDEX: where pip finds torch's
# wheel for the CUDA driver that is there, as in https://download.pytorch.org/whl/cu126; PyPI's own otherwise.
set -euo pipefail

case ${1:-} in
    -h | --help)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
        exit 0
        ;;
esac

here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
folder=${1:-$here/results}
[ $# -gt 0 ] && shift
venv=${VENV:-$root/.venv-gpu}

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L | grep -q GPU; then
    echo "gpu.sh: nvidia-smi finds no GPU here" >&2
    exit 1
fi
mkdir -p "$folder"

if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --upgrade pip
    # torch first and by itself: DeepSpeed's setup imports it.
    "$venv/bin/pip" install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
    "$venv/bin/pip" install --quiet "$root[train]"
fi

nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv
# The checkout's own code, whatever the environment holds.
PYTHONPATH=$root exec "$venv/bin/python" "$here/planner_gpu.py" --output "$folder" "$@"
