#!/usr/bin/env bash
# Sets up a test environment on a fresh machine and passes the tests: lint, types, then the tests of a lane.
# Needs Python >= 3.10 with venv. What else the tests use is installed here: system packages where that is allowed.
#
#   bash tests/run.sh               the default lane: one model a layout, one launcher a fault
#   bash tests/run.sh -m fast       what starts no launcher and trains nothing
#   bash tests/run.sh --full        whole grids too: every launcher with every stage, ...
#   bash tests/run.sh --versions lowest ...                                  the lowest versions that setup.cfg allows
#   bash tests/run.sh --versions torch==2.11.0,transformers==5.17.0 ...      these, the others as new as can be
#
# --versions comes first; each set has an environment of its own, which stays (.venv-versions-*; gigabytes where torch's
# CUDA build is what the index has), and lint and types, which don't depend on it, are left out.
# Other arguments are pytest's, too. tests/full.py runs the full lane and writes its results into docs/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

versions=
if [ "${1:-}" = --versions ]; then
    versions=${2:?--versions takes lowest, or NAME==VERSION with commas between}
    constraints=$(python3 tests/lowest.py "$versions")
    shift 2
fi

# A compiler and Python's headers for DeepSpeed's operators, libaio for the NVMe preset, git for the run folder's record,
# patch for what validate prints.
packages=(g++ libaio-dev git patch)
python3 -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
    || packages+=(python3-dev)
# For tests/cluster_lab: namespaces as hosts, what reaches them, and Slurm. Both MPIs stand beside each other as
# mpirun.openmpi and mpiexec.hydra; plain mpirun is Open MPI's.
packages+=(iproute2 openssh-server openssh-client pdsh munge slurm-wlm openmpi-bin mpich numactl)
# tests/reports looks at pages in a real browser where there is one: 300 MB, for the full lane alone.
case " $* " in *" --full "*) packages+=(chromium chromium-driver) ;; esac
missing=()
for package in "${packages[@]}"; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if ((${#missing[@]})) && command -v apt-get >/dev/null; then
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    install() {
        DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    }
    "${as_root[@]}" apt-get update -qq >/dev/null || true
    # One by one where not all can be had.
    install "${missing[@]}" || for package in "${missing[@]}"; do
        install "$package" || echo "could not install $package; tests that need it will say so" >&2
    done
fi

if [ -n "$versions" ]; then
    environment=.venv-versions-$({ python3 -V; echo "$constraints"; } | sha256sum | cut -c1-12)
    if [ ! -e "$environment/complete" ]; then # one that was interrupted is made anew
        python3 -m venv --clear "$environment"
        echo "$constraints" >"$environment/constraints.txt"
        "$environment/bin/python" -m pip install -q -c "$environment/constraints.txt" -e '.[train,board,logs,test]' liger-kernel
        # Triton before 3.4 asks for a GPU when DeepSpeed is imported (presets/versions/imports.toml). It comes with torch's
        # CUDA build alone, so that without it the environment is as with the CPU build, which isn't in the index.
        if "$environment/bin/python" -c 'import deepspeed' 2>&1 | grep -q '0 active drivers'; then
            "$environment/bin/python" -m pip uninstall -q -y triton
        fi
        touch "$environment/complete"
    fi
    echo "$environment:" $constraints
    "$environment/bin/python" -m pip check || true
else
    environment=${DSRUN_TEST_VENV:-.venv-test}
    # One that was interrupted before it had pip is made again.
    "$environment/bin/python" -m pip --version >/dev/null 2>&1 || python3 -m venv "$environment"
    # One version, so that a machine with a CPU build at hand takes that; setup.cfg admits what users have.
    "$environment/bin/python" -m pip install -q torch==2.13.0 -e '.[train,test]'

    "$environment/bin/ruff" check .
    "$environment/bin/ruff" format --check .
    # Types take one core. On the other the tests are compiled, once for all workers; what is wrong there, those say.
    PYTHONDONTWRITEBYTECODE= "$environment/bin/python" -m pytest --collect-only -q >/dev/null 2>&1 &
    compiling=$!
    "$environment/bin/mypy" || { wait $compiling; exit 1; }
    wait $compiling || true
fi
# A file's tests stay together: they share runs. More files at a time than a small machine has cores: those that start
# jobs wait for one another's imports. The fast lane's don't wait. Which come first tests/conftest.py says.
workers=4
case " $* " in *" -m fast "*) workers=3 ;; esac
# The tests make files with Chinese names, which a locale such as C has no bytes for unless Python is told.
[ "$("$environment/bin/python" -c 'import sys; print(sys.getfilesystemencoding())')" = utf-8 ] || export PYTHONUTF8=1
# Hundreds of processes import the same modules: each is compiled once.
export PYTHONDONTWRITEBYTECODE=
exec "$environment/bin/python" -m pytest -n "${DSRUN_TEST_WORKERS:-$workers}" --dist loadfile --no-loadscope-reorder "$@"
