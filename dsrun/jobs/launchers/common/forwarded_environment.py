"""The forwarded environment: which of the user's variables the ranks on other hosts get.

DeepSpeed's launcher takes only what begins with MLFLOW, PYTHON, MV2, UCX or NCCL, and what .deepspeed_env holds
(deepspeed/launcher/runner.py, 0.19): HF_ENDPOINT, GLOO_SOCKET_IFNAME or LD_LIBRARY_PATH stay at home. Its own rule is
part of this one. Values are texts here and nowhere shell: nothing is expanded, nothing is quoted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsrun.catalog import closest
from dsrun.cluster.hostnames import shown as quoted
from dsrun.errors import Problem, collected, raise_all
from dsrun.files import read_text

OPTION = "--env"

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""POSIX, Base Definitions, 8.1; what a shell can export."""

# The first line is DeepSpeed's own rule (EXPORT_ENVS, and what its CUDA accelerator adds).
PREFIXES = (
    "MLFLOW", "PYTHON", "MV2", "UCX", "NCCL",
    # Hugging Face, and where runs are reported.
    "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "TOKENIZERS_", "ACCELERATE_", "PEFT_", "DIFFUSERS_",
    "SAFETENSORS_", "MODELSCOPE_", "TIKTOKEN_", "WANDB_", "COMET_", "SWANLAB_", "CLEARML_", "NEPTUNE_", "TENSORBOARD_",
    "TRACKIO_",
    # torch, DeepSpeed, and what they compile with.
    "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "DS_", "DEEPSPEED_", "DSRUN_", "CUDA_",
    "CUBLAS_", "CUDNN_", "CUTLASS_", "NVCC_", "NVTE_", "NVSHMEM_", "BNB_", "BITSANDBYTES_", "FLASH_ATTENTION_",
    "XFORMERS_", "NUMBA_", "KINETO_", "HIP_", "HSA_", "ROCM_", "MIOPEN_", "RCCL_", "ASCEND_", "HCCL_", "CCL_",
    # The network.
    "GLOO_", "TP_", "UCC_", "SHARP_", "HCOLL_", "OFI_", "FI_", "IBV_", "RDMAV_", "MLX5_", "PSM2_", "PSM3_",
    # Threads and memory on the CPU.
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_", "TCMALLOC_",
    "LC_",
)  # fmt: skip
NAMES = frozenset({
    "PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
    "PKG_CONFIG_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME", "NLTK_DATA", "MPLBACKEND", "MPLCONFIGDIR", "MAX_JOBS", "CC", "CXX", "CFLAGS",
    "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDAHOSTCXX", "CUDACXX", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY",
    "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "LANG", "LANGUAGE", "TZ", "NVIDIA_TF32_OVERRIDE",
})  # fmt: skip
NEVER = re.compile(
    r"\w*VISIBLE_DEVICES"  # each host has its own
    r"|MV2_COMM_WORLD_\w+"  # mpirun of MVAPICH sets them for one process
    r"|WANDB_SERVICE|WANDB__SERVICE\w*"  # a socket of a process of this machine
    r"|DSRUN_(SUPERVISOR_PID|NODE)"
)
"""Variables with such a prefix that belong to one machine or one process."""
OURS = frozenset({
    "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "DSRUN_SUPERVISOR_PID", "DSRUN_NODE",
    "DSRUN_VISIBLE_DEVICES", "DSRUN_LOG_LIMIT",
})  # fmt: skip
"""Variables that dsrun or DeepSpeed's launcher (launch.py) sets in each rank, whatever the user requests."""


def is_forwarded(name: str) -> bool:
    """Whether a variable of the user's is forwarded without being named."""
    if not NAME.fullmatch(name) or name in OURS or NEVER.fullmatch(name):
        return False
    return name in NAMES or name.startswith(PREFIXES)


def forwarded(
    environ: Mapping[str, str],
    *,
    add: Sequence[str] = (),
    files: Sequence[Path] | None = None,
    cluster: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The variables that every rank gets, by name. What comes later wins: environ < cluster < files < add.

    add: `NAME` (the user's value) or `NAME=VALUE`, as --env takes them. files: the .deepspeed_env files to read, by
    default those that DeepSpeed's launcher reads. cluster: what a cluster's file says. On PATH
    this Python's folder comes first unless PATH has it, so that ninja and the like are found.

    Raises DsrunError with every text, line and name that is wrong.
    """
    problems: list[Problem] = []
    variables = {name: value for name, value in environ.items() if is_forwarded(name)} | dict(cluster or {})
    for path in env_files(environ) if files is None else files:
        with collected(problems):
            variables |= read(path)
    for text in add:
        name, equals, value = text.partition("=")
        if problem := problem_of(name, value, OPTION):
            problems.append(problem)
        elif not equals and name not in environ:
            near = closest(name, environ)
            hint = f"Export it first, or write {OPTION} {name}=VALUE." + (
                f" Did you mean {near}?" if near else ""
            )
            problems.append(Problem(f"{name} is not set here", OPTION, hint))
        else:
            variables[name] = value if equals else environ[name]
    raise_all(problems)
    variables["PATH"] = with_folder(variables.get("PATH") or os.defpath, str(Path(sys.executable).parent))
    return dict(sorted(variables.items()))


def with_folder(path: str, folder: str) -> str:
    """A value of PATH with this folder first, unless it is in it somewhere."""
    return path if folder in path.split(os.pathsep) else f"{folder}{os.pathsep}{path}"


def problem_of(name: str, value: str, where: str) -> Problem | None:
    """The problem of a variable that the user requests."""
    if not NAME.fullmatch(name):
        hint = "Letters, digits and underscores, with no digit first"
        hint += f": {OPTION} NAME or {OPTION} NAME=VALUE." if where == OPTION else "."
        return Problem(f"{quoted(name)} isn't a variable's name", where, hint)
    if name in OURS:
        by_option = name in {"CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT"}
        hint = "; devices, --master-addr and --master-port are options" if by_option else ""
        return Problem(f"{name} is set for each rank by dsrun", where, f"Remove it{hint}.")
    if "\0" in value:
        return Problem(f"the value of {name} holds a NUL byte, which no environment can", where)
    return None


ENV_FILE = ".deepspeed_env"
MISREAD = (
    (
        re.compile(r"^(?P<quote>[\"']).*(?P=quote)$", re.DOTALL),
        "stands in quotes",
        "DeepSpeed's launcher puts quotes of its own around it, so a text with spaces falls apart. Write {name}= and "
        "the value alone: it goes to the end of the line.",
    ),
    (
        re.compile(r"`|\$[\w{(@*#?$!-]"),
        "holds a variable or a command for the shell",
        "With DeepSpeed's launcher the shell of each host would expand it; dsrun expands nothing. Write out what it "
        f"stands for, or pass it with {OPTION} {{name}}=VALUE, where your own shell expands it.",
    ),
    (
        re.compile(r"(?:^|\s)#"),
        "holds a #",
        "It would be part of the value. Put the comment on a line of its own.",
    ),
)
"""Values of a file that would not arrive as they are written: what they look like, what is wrong, what to do."""


def env_files(environ: Mapping[str, str], cwd: Path = Path()) -> list[Path]:
    """The files that DeepSpeed's launcher would read, in its order: the later one wins.

    In the home folder and in the one that it is started in, under the name in $DS_ENV_FILE or .deepspeed_env.
    """
    name = environ.get("DS_ENV_FILE", ENV_FILE)
    home = environ.get("HOME") or str(Path.home())
    files: dict[Path, Path] = {}
    for folder in (Path(home), cwd):
        path = folder / name  # an absolute name stands for itself, as in os.path.join
        if path.is_file():
            files.setdefault(path.resolve(), path)
    return list(files.values())


def read(path: Path) -> dict[str, str]:
    """The variables of a .deepspeed_env file. Raises DsrunError with every line that is wrong."""
    return parse(read_text(path).removeprefix("\ufeff"), str(path))


def parse(text: str, where: str) -> dict[str, str]:
    """The variables of a .deepspeed_env file's text; `where` names the file. Raises DsrunError.

    The grammar is DeepSpeed's, NAME=VALUE to the end of the line, less what does not arrive there as it is written.
    Blank lines and lines that begin with # are fine here: DeepSpeed's launcher ends with a traceback at the first kind,
    and at the second with that, or (`# a=b`) starts nothing and exits 0.
    """
    variables: dict[str, str] = {}
    problems: list[Problem] = []
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        name, equals, value = (part.strip() for part in line.strip().partition("="))
        name = re.sub(r"^export\s+", "", name)  # `export export X=1` is what the remote shell gets, and takes
        if problem := _line_problem(name, value if equals else None, f"{where}:{number}"):
            problems.append(problem)
        else:
            variables[name] = value
    raise_all(problems)
    return variables


def _line_problem(name: str, value: str | None, where: str) -> Problem | None:
    """The problem of a line. No value is in the message, nor a line without a name: they may be secrets."""
    if value is None:
        hint = "DeepSpeed's launcher ends with a ValueError here. Write NAME=VALUE, or # in front."
        return Problem("is not NAME=VALUE", where, hint)
    if problem := problem_of(name, value, where):
        return problem
    for pattern, fault, hint in MISREAD:
        if pattern.search(value):
            return Problem(f"the value of {name} {fault}", where, hint.format(name=name))
    return None
