#!/usr/bin/env bash
# One part of the bench for GPUs, in under nine minutes, without a network:
#
#   bench/gpu/run.sh PART [ARGUMENTS]     PART: works, speed, planned or many; ARGUMENTS: of bench/gpu/PART.py (--help)
#
# works     does everything run here, with the losses of a CPU?
# speed     kernels, optimizers, Llama-3-8B's widths: how much of the card is used, beside a plain Trainer?
# planned   what the planner says of memory and seconds, against what runs take
# many      on 2 to 8 GPUs: tokens/s of zero1, zero2, zero3 and fsdp, overlap, NCCL's bandwidth
#
# Each case writes its result at once, as a line of JSON, into bench/results/gpu (or --output FOLDER);
# `python bench/gpu/page.py --write` makes docs/reference/gpu.md of them, and a verification card of
# each model, preset and card. `--tiny` does the same on a CPU and in miniature, to see that the bench works. `--keep FOLDER`
# keeps what is made once (random models of 22 GB, compiled operators) for the next call.
#
# PYTHON: an interpreter that has torch and transformers ("python3"). What it lacks is installed into its environment from
# WHEELS, a folder that bench/gpu/make_wheels.sh has filled (.whl in the checkout), where that is there.
set -euo pipefail

case ${1:-} in
    works | speed | planned | many) part=$1 && shift ;;
    *)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
        [ "${1:-}" = -h ] || [ "${1:-}" = --help ] || exit 2
        exit 0
        ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
wheels=${WHEELS:-$root/.whl}

if [ -f "$wheels/names.txt" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --find-links "$wheels" -r "$wheels/names.txt"
fi
"$python" -c 'import deepspeed, torch, transformers' || {
    echo "run.sh: $python lacks them; PYTHON names another one, WHEELS the wheels (make_wheels.sh)" >&2
    exit 1
}
# nvcc from pip's packages doesn't find its own headers, and its linker not the runtime under the name without a number.
cuda=$("$python" -c 'import glob, nvidia; print((glob.glob(list(nvidia.__path__)[0] + "/cu1[0-9]") or [""])[0])' 2>/dev/null || true)
if [ -n "$cuda" ]; then
    links=${TMPDIR:-/tmp}/dsrun-cuda-links
    mkdir -p "$links"
    for file in "$cuda"/lib/libcudart.so.*; do ln -sf "$file" "$links/libcudart.so"; done
    export CPATH=$cuda/include${CPATH:+:$CPATH} LIBRARY_PATH=$links:$cuda/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
fi
export PYTHONPATH=$root HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
PATH=$(dirname "$(command -v "$python")"):$PATH # so that `deepspeed` is found beside it
exec "$python" "$here/$part.py" "$@"
