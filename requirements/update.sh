#!/usr/bin/env bash
# Pins every package that README's lines install but those of [gpu], with the hashes of its files, for Python 3.10 and newer.
# Needs uv (pip install uv). pip installs the result: docs/howto/install.md.
#
#   train.txt   all but torch and what comes with its CUDA build
#   cuda.txt    these
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
torch=$(grep -om1 'torch==[0-9.]*' README.md) # the one version that README names
compile=(uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-config
    --no-header --upgrade --output-file)
without() { printf -- '--no-emit-package %s ' "$@"; }
all=$(mktemp)
trap 'rm "$all"' EXIT
echo "$torch" | "${compile[@]}" "$all" - setup.cfg --extra train --extra board
of_cuda=$(sed -nE 's/^(torch|triton|cuda-[a-z-]+|nvidia-[a-z0-9-]+)==.*/\1/p' "$all" | grep -vx nvidia-ml-py | sort -u)
others=$(sed -nE 's/^([a-z0-9._-]+)==.*/\1/p' "$all" | grep -vxF "$of_cuda" | sort -u)
note() { echo "# Made by requirements/update.sh."; }
for file in train cuda; do
    case $file in train) left_out=$of_cuda ;; cuda) left_out=$others ;; esac
    # What the first pass chose stays.
    # shellcheck disable=SC2046,SC2086
    echo "$torch" | "${compile[@]}" "requirements/$file.txt" --constraint "$all" $(without $left_out) - setup.cfg \
        --extra train --extra board
    note | cat - "requirements/$file.txt" >"$all.new" && mv "$all.new" "requirements/$file.txt"
done
