#!/usr/bin/env bash
# How fast training is on this machine's GPUs, and what the planner says of them against what runs take: sets up an
# environment, runs bench/throughput_gpu.py (three quarters of the time), and with what is left bench/planner_gpu.py.
#
#   bench/gpu.sh [FOLDER [ARGUMENTS OF planner_gpu.py]]
#
# FOLDER gets the tables (throughput-gpu-DATE.md, planner-gpu-DATE.md) and the figures (the same, .json); bench/results
# otherwise. BUDGET_S: seconds for everything, setting up included (530); no run is started that would end later. What
# is not reached is left out: BUDGET_S=7200 reaches everything. TINY=1 does without a GPU: it trains models in miniature
# on the CPU, to see that the bench works.
# VENV: the environment's folder (.venv-gpu otherwise; used as it is where it exists). TORCH_INDEX: an index URL where
# pip finds torch's wheel for the CUDA driver that is there; pip's own otherwise.
set -euo pipefail
began=$SECONDS

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

budget=${BUDGET_S:-530}
tiny=${TINY:+--tiny}

if [ -z "$tiny" ] && { ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L | grep -q GPU; }; then
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
    # Both are used where they are there; neither has to be.
    [ -n "$tiny" ] || "$venv/bin/pip" install --quiet "$root[gpu]" || echo "gpu.sh: without dsrun[gpu]" >&2
fi

# The checkout's own code, whatever the environment holds.
export PYTHONPATH=$root
left() { echo $((budget - (SECONDS - began))); }
"$venv/bin/python" "$here/throughput_gpu.py" --output "$folder" --budget "$(($(left) * 3 / 4))" $tiny
[ -z "$tiny" ] || exit 0

nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv
exec "$venv/bin/python" "$here/planner_gpu.py" --output "$folder" --budget "$(left)" "$@"
