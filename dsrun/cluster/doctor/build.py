"""Can DeepSpeed's operators be compiled, and does a killed build block them?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from dsrun.cluster.doctor.check import GREEN, GREY, RED, YELLOW, Host, Status, each
from dsrun.versions import version

TITLE = "build"
ORDER = 60
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "wekafs")
"""File systems that hosts may share."""


@each("locks", "operators")
def locks(host: Host) -> Status:
    """A killed build leaves a file for which every later run waits silently (torch/utils/file_baton.py)."""
    fact = host["operators"]
    if fact["stale"]:
        names = [path.split("/")[-2] for path in fact["stale"]]
        age = f" {fact['oldest_lock_hours']:g} hours ago" if fact.get("oldest_lock_hours") else ""
        state = f"a killed build left a lock on {', '.join(names)}{age}: every run waits for it silently"
        return Status(RED, state, f"rm {shlex.join(fact['stale'])}")
    if fact["locks"]:
        return Status(GREEN, f"{len(fact['locks'])} being built now")
    return Status(GREEN, "none")


@each("compiler", "tools", "operators")
def compiler(host: Host) -> Status:
    """DeepSpeed compiles what it needs at first use."""
    lack = f"no C++ compiler ({host['tools']['compiler_name']})"
    return _tool(host, "compiler", lack, "apt-get install g++ (or set CXX)")


@each("nvcc", "tools", "torch", "operators", "gpus")
def nvcc(host: Host) -> Status:
    """DeepSpeed refuses to compile with another CUDA than torch's (op_builder/builder.py, assert_no_cuda_mismatch)."""
    cuda, tools = host["torch"]["cuda"], host["tools"]
    if cuda is None or not host.gpus:
        return Status(GREY, "no operator for GPUs")
    if not tools["nvcc"]:
        toolkit = cuda.partition(".")[0]
        fix = f"Install the CUDA toolkit {toolkit} and set CUDA_HOME; or torch_adam: true in the optimizer."
        return _lacks(host, "no nvcc", fix)
    if not tools["nvcc_version"]:
        return Status(GREY, f"{tools['nvcc']} doesn't say its version")
    state = f"nvcc {tools['nvcc_version']} for torch's CUDA {cuda}"
    major = version(cuda)[0]
    if version(tools["nvcc_version"])[0] != major:
        fix = f"Install the CUDA toolkit {cuda} beside it, and set CUDA_HOME to it."
        return _lacks(host, f"nvcc {tools['nvcc_version']}, and torch is built for CUDA {cuda}", fix)
    if not goes_with(tools["nvcc_version"], cuda):
        fix = f"Install the CUDA toolkit {cuda} and set CUDA_HOME to it, or export DS_SKIP_CUDA_CHECK=1"
        return _lacks(host, f"{state}: DeepSpeed refuses another minor version of CUDA {major}", fix)
    return Status(GREEN, state)


def goes_with(nvcc: str, cuda: str) -> bool:
    """Whether DeepSpeed compiles with this nvcc for a torch of that CUDA.

    DeepSpeed 0.19 takes another minor version only for the CUDAs that it lists (cuda_minor_mismatch_ok).
    """
    own, wanted = version(nvcc)[:2], version(cuda)[:2]
    return own == wanted or (own[:1] == wanted[:1] and wanted[0] in (10, 11, 12))


@each("cuda-parts", "toolkit", "torch", "operators", "gpus")
def parts(host: Host) -> Status:
    """An nvcc alone compiles nothing: toolkits of pip and conda, and slim containers, have a part of the headers."""
    fact, cuda = host["toolkit"], host["torch"]["cuda"]
    if cuda is None or not host.gpus or fact["home"] is None:
        return Status(GREY, "no nvcc to look at" if cuda and host.gpus else "no operator for GPUs")
    if lacking := [*fact["no_headers"], *(f"lib{name}.so" for name in fact["no_libraries"])]:
        fix = (
            f"Install the whole CUDA toolkit {cuda} and set CUDA_HOME to it; of pip's the rest is in nvidia-cublas, "
            "nvidia-cusparse, nvidia-cusolver and nvidia-curand (CPATH, LIBRARY_PATH)."
        )
        return _lacks(host, f"{fact['home']} lacks {', '.join(lacking)}", fix)
    newest, have = fact["gcc"], fact["compiler_major"]
    if newest and have and have > newest and "clang" not in fact["compiler"]:
        fix = f"apt-get install g++-{newest}, then: export CC=gcc-{newest} CXX=g++-{newest} NVCC_CCBIN=g++-{newest}"
        return _lacks(host, f"{fact['compiler']} is gcc {have}, and nvcc takes up to {newest}", fix)
    return Status(GREEN, f"headers and libraries in {fact['home']}")


@each("cache", "operators", "gpus", "torch")
def cache(host: Host) -> Status:
    """Operators of another torch end in an undefined symbol, those for other GPUs in 'no kernel image is available'."""
    fact = host["operators"]
    fix = (
        f"rm -r {shlex.quote(str(fact['folder']))}  # they are compiled again; or unset TORCH_EXTENSIONS_DIR"
    )
    if other := [build["name"] for build in fact["builds"] if not build["own_torch"]]:
        return Status(YELLOW, f"{', '.join(other)} compiled with another torch", fix)
    if fact["given"] and fact["built"] and str(fact["file_system"]).startswith(SHARED):
        state = f"TORCH_EXTENSIONS_DIR is on {fact['file_system']}: a host with another processor dies with SIGILL"
        return Status(YELLOW, state, "unset TORCH_EXTENSIONS_DIR: dsrun keeps a folder for each processor")
    cards = {str(gpu["compute_capability"]) for gpu in host.gpus if gpu.get("compute_capability")}
    for build in fact["builds"] if host.trains_on_gpus else ():
        if build["gpus"] and (left := sorted(card for card in cards if not _runs(build["gpus"], card))):
            state_of = f"{build['name']} is compiled for {', '.join(build['gpus'])}"
            return Status(RED, f"{state_of}, and there is a GPU of {left[0]}", fix)
    return Status(GREEN, f"{len(fact['built'])} compiled in {fact['folder']}")


def _runs(built: Sequence[str], card: str) -> bool:
    """Code for 8.0 runs on 8.6, and not on 9.0 or 7.5 (CUDA's binary compatibility)."""
    have = version(card)
    return any(version(code)[0] == have[0] and version(code) <= have for code in built)


@each("ninja", "tools", "operators")
def ninja(host: Host) -> Status:
    """torch compiles with ninja (torch/utils/cpp_extension.py, verify_ninja_availability)."""
    return _tool(host, "ninja", "no ninja", "pip install ninja")


@each("headers", "python", "operators")
def headers(host: Host) -> Status:
    """Operators are Python modules: compiling one takes Python.h."""
    fact = host["python"]
    if fact.get("header"):
        return Status(GREEN, str(fact["header"]))
    if fact.get("missing"):
        return Status(GREY, "no Python of the job")
    return _lacks(host, f"no Python.h in {fact['include']}", f"apt-get install python{host.python_minor}-dev")


@each("libaio", "tools")
def libaio(host: Host) -> Status:
    """Only offload to NVMe needs it."""
    header, library = host["tools"]["libaio_header"], host["tools"]["libaio"]
    if header and library:
        return Status(GREEN, str(library))
    lack = "no libaio" if not library else "no header of libaio"
    return Status(YELLOW, f"{lack}: offload to NVMe needs it", "apt-get install libaio-dev")


def _tool(host: Host, name: str, lack: str, fix: str) -> Status:
    path = host["tools"][name]
    return Status(GREEN, str(path)) if path else _lacks(host, lack, fix)


def _lacks(host: Host, lack: str, fix: str) -> Status:
    """Red where nothing is compiled yet, so that a job is sure to stop there."""
    built = host["operators"]["built"]
    if built:
        return Status(YELLOW, f"{lack}; compiled already: {', '.join(built)}", fix)
    return Status(RED, lack, fix)
