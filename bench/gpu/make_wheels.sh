#!/usr/bin/env bash
# Fills a folder with the wheels that an offline machine needs for the bench beside torch, transformers, accelerate and
# peft, which it has: for Python 3.12 on x86-64 Linux, about 40 MB.
#
#   bench/gpu/make_wheels.sh [FOLDER]     .whl in the checkout otherwise, which git then leaves out
#
# They come from where pip gets packages here. bench/gpu/run.sh installs what lies there; by hand:
#   python -m pip install --no-index --no-deps --find-links FOLDER -r FOLDER/names.txt
# PYTHON ("python3") builds those that have no wheel; nothing of them is compiled before the machine with the GPU does.
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
        exit 0
        ;;
esac
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$root/.whl}
most=$((60 * 1000 * 1000))

# Of DeepSpeed, of dsrun, of its scores, of its curve. Not datasets: dsrun doesn't import it, and the Trainer does without;
# not hyperscan, without which dsrun diagnoses more slowly. A test compares the lists with setup.cfg.
deepspeed="hjson einops py-cpuinfo msgpack ninja"
own="click rich markdown-it-py mdurl pygments jinja2 markupsafe psutil nvidia-ml-py liger-kernel sentencepiece gguf
jsonschema jsonschema-specifications referencing rpds-py attrs torchao"
scores="rouge-chinese six nltk joblib defusedxml cloudpickle"
curve="matplotlib contourpy cycler kiwisolver pyparsing python-dateutil pillow"
with_its_own="pydantic" # pydantic-core in the one version that it takes
built="deepspeed==0.19.8 jieba==0.42.1 fonttools" # without wheels, or with one that is four times as large

rm -rf "$folder" && mkdir -p "$folder"
grep -qxs "/.whl/" "$root/.git/info/exclude" || git -C "$root" check-ignore -q .whl ||
    echo "/.whl/" >>"$(git -C "$root" rev-parse --path-format=absolute --git-path info/exclude)"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install 'setuptools<81' wheel

there=(--only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none --dest "$folder")
for kind in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux1; do there+=(--platform "${kind}_x86_64"); done
# shellcheck disable=SC2086  (lists)
pip download "${there[@]}" --platform any --no-deps $deepspeed $own $scores $curve
# shellcheck disable=SC2086
pip download "${there[@]}" --platform any $with_its_own
# shellcheck disable=SC2086
DS_BUILD_OPS=0 FONTTOOLS_WITH_CYTHON=0 pip wheel --no-deps --no-build-isolation --no-binary :all: --wheel-dir "$folder" $built >"$work/log" 2>&1 || {
    tail -20 "$work/log" >&2
    exit 1
}
# Most of jieba is a network that nobody asks for here.
(cd "$work" && venv/bin/wheel unpack -d jieba "$folder"/jieba-*.whl && rm -r jieba/*/jieba/lac_small && venv/bin/wheel pack -d "$folder" jieba/*) >/dev/null

for file in "$folder"/*.whl; do basename "$file" | sed 's/-[0-9].*//'; done | sort -u >"$folder/names.txt"
bytes=$(cat "$folder"/*.whl | wc -c)
echo "$(wc -l <"$folder/names.txt") wheels, $((bytes / 1000000)) MB in $folder"
[ "$bytes" -lt "$most" ] || { echo "make_wheels.sh: more than $((most / 1000000)) MB" >&2 && exit 1; }
