"""The owner of a frame of a traceback: that decides what an exception there can mean, and who can correct it.

A KeyError in the user's own file is a key of the user's; the same line in a library's file may tell of a model that
the library doesn't know. `USER` is what no other pattern claims: a script, a notebook's cell, a clone of a project.
"""

from __future__ import annotations

import re
from functools import lru_cache

USER, TRAINER, LIBRARY, RUNTIME, COMPILED = "user", "trainer", "library", "runtime", "compiled"
OWNERS = (USER, TRAINER, LIBRARY, RUNTIME, COMPILED)
"""The user's own code; a training program's, which people run and seldom change; an installed package's; Python's
own; code that is no Python, of which a traceback only has the file's name."""
REMOTE_CODE = "the model's own code"
"""The package of a file that came with a model from the Hub."""
TRAINERS = frozenset(
    {"llamafactory", "llmtuner", "axolotl", "swift", "fastchat", "openrlhf", "verl", "colossalai", "lmflow", "xtuner",
     "mmengine", "torchtitan", "torchtune", "litgpt", "nemo", "nemo_rl", "megatron", "unsloth", "unsloth_zoo", "oumi",
     "instructlab", "open_r1", "composer", "llmfoundry"}
)  # fmt: skip
"""Packages that are training programs, wherever they are installed or cloned."""

# A path is matched with forward slashes, so that Windows' paths need no patterns of their own.
_PYTHON = re.compile(r"/lib(?:64)?/python3[\d.]{0,4}/(?!(?:site|dist)-packages/)")
_PYTHON_ON_WINDOWS = re.compile(r"\\[Ll]ib\\\w{1,40}\.py$|\\[Pp]ython\d{1,4}\\[Ll]ib\\(?!site-packages)")
_FROZEN = re.compile(r"^<(?!ipython|string|stdin|unknown)")
_INSTALLED = re.compile(r"(?:site|dist)-packages/(?:[^/]{1,80}\.egg/)?(?P<package>\w{1,60})")
_COMPILED = re.compile(r"\.(?:pyx|pxi|pxd|so|cpp|cc|cu|cuh|c|h|rs|pyd)$|(?:^|/)lib\w{1,40}\.so")
_REMOTE = re.compile(r"(?:^|/)transformers_modules/")
_MADE = re.compile(r"(?:^|/)unsloth_compiled_cache/")
"""Trainers that Unsloth writes out of TRL's as it starts."""
_CLONES = re.compile(
    r"/src/(?P<src>transformers|peft|accelerate|datasets|trl|diffusers|llamafactory|llmtuner|axolotl|torchtitan|open_r1)/"
    r"|/(?P<deepspeed>deepspeed)/(?:runtime|launcher|ops|utils|inference|comm|module_inject|moe|sequence|checkpoint"
    r"|compile)/"
    r"|/(?P<megatron>megatron)/(?:core|training|legacy|model|data|bridge)/"
    r"|/(?P<swift>swift)/(?:llm|cli|trainers?|tuners|utils|megatron|template|pipelines|dataset|model)/"
    r"|/(?P<trainer>llamafactory|llmtuner|axolotl|fastchat|openrlhf|verl|colossalai|lmflow|xtuner|mmengine)/"
    r"|/(?P<trl>trl)/trainer/|/(?P<lightning>pytorch_lightning|lightning)/(?:pytorch|fabric|trainer|core|utilities)/"
    r"|/(?P<nemo>nemo)/(?:core|collections|lightning)/|/(?P<kohya>library)/train_util\.py"
)
"""Packages that people run from a clone, by folders that no script of their own has."""


@lru_cache(maxsize=4096)
def owner(file: str) -> tuple[str, str]:
    """The owner of a file, and its package: empty for the user's own and for Python's own."""
    path = file.replace("\\", "/")
    if _COMPILED.search(path):
        installed = _INSTALLED.search(path)
        return COMPILED, installed["package"] if installed else path.split("/")[0].partition(".")[0]
    if _REMOTE.search(path):
        return LIBRARY, REMOTE_CODE
    if _MADE.search(path):
        return TRAINER, "unsloth"
    if installed := _INSTALLED.search(path):
        package = installed["package"]
        return (TRAINER if package in TRAINERS else LIBRARY), package
    if _PYTHON.search(path) or _FROZEN.match(path) or _PYTHON_ON_WINDOWS.search(file):
        return RUNTIME, ""
    if clone := _CLONES.search(path):
        package = next(name for name in clone.groupdict().values() if name)
        return (TRAINER if package in TRAINERS or package == "library" else LIBRARY), package
    return USER, ""


def module_of(file: str) -> str:
    """The dotted module that a package's file is; empty where the path doesn't tell."""
    path = file.replace("\\", "/")
    package = owner(file)[1]
    start = path.rfind(f"/{package}/") if package and package != REMOTE_CODE else -1
    if start < 0 or not path.endswith(".py"):
        return ""
    name = path[start + 1 : -len(".py")].replace("/", ".")
    return name.removesuffix(".__init__")
