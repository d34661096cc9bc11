"""Can DeepSpeed's operators be compiled, and does a killed build block them?"""

from __future__ import annotations

import shlex

from dsrun.cluster.doctor.check import GREEN, GREY, RED, YELLOW, Host, Status, each
from dsrun.versions import version

TITLE = "build"
ORDER = 60


@each("locks", "operators")
def locks(host: Host) -> Status:
    """A killed build leaves a file for which every later run waits silently (torch/utils/file_baton.py)."""
    fact = host["operators"]
    if fact["stale"]:
        names = [path.split("/")[-2] for path in fact["stale"]]
        what = f"a killed build left a lock on {', '.join(names)}: every run waits for it silently"
        return Status(RED, what, f"rm {shlex.join(fact['stale'])}")
    if fact["locks"]:
        return Status(GREEN, f"{len(fact['locks'])} being built now")
    return Status(GREEN, "none")


@each("compiler", "tools", "operators")
def compiler(host: Host) -> Status:
    """DeepSpeed compiles what it needs at first use."""
    what = f"no C++ compiler ({host['tools']['compiler_name']})"
    return _tool(host, "compiler", what, "apt-get install g++ (or set CXX)")


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
    if version(tools["nvcc_version"])[:2] != version(cuda)[:2] and major not in (10, 11, 12):
        # DeepSpeed 0.19 takes other minor versions only for the CUDAs it lists (cuda_minor_mismatch_ok).
        return Status(
            YELLOW, f"{state}: another minor version", f"CUDA toolkit {cuda}, or DS_SKIP_CUDA_CHECK=1"
        )
    return Status(GREEN, state)


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
    minor = ".".join(str(fact["version"]).split(".")[:2])
    return _lacks(host, f"no Python.h in {fact['include']}", f"apt-get install python{minor}-dev")


@each("libaio", "tools")
def libaio(host: Host) -> Status:
    """Only offload to NVMe needs it."""
    header, library = host["tools"]["libaio_header"], host["tools"]["libaio"]
    if header and library:
        return Status(GREEN, str(library))
    what = "no libaio" if not library else "no header of libaio"
    return Status(YELLOW, f"{what}: offload to NVMe needs it", "apt-get install libaio-dev")


def _tool(host: Host, name: str, what: str, fix: str) -> Status:
    found = host["tools"][name]
    return Status(GREEN, str(found)) if found else _lacks(host, what, fix)


def _lacks(host: Host, what: str, fix: str) -> Status:
    """Red where nothing is compiled yet, so that a job is sure to stop there."""
    built = host["operators"]["built"]
    if built:
        return Status(YELLOW, f"{what}; compiled already: {', '.join(built)}", fix)
    return Status(RED, what, fix)
