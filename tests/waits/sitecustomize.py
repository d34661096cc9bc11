"""For a Python in which each wait for the device is counted: WAITS names the folder for each rank's counts.

On a GPU the host would wait wherever a tensor's value is read or the device is synchronised. Both are counted on CPU
ranks, by who asked for it, and written down for each step: dsrun's loop reads its own numbers once a step, last of all.
"""

import gc
import json
import os
import sys
from collections import Counter
from importlib.abc import MetaPathFinder
from pathlib import Path

gc.set_threshold(200_000, 50, 1000)  # as in tests/light
LOOP = "dsrun.training.loop"
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")
steps: list[dict[str, int]] = []
counts: Counter[str] = Counter()


def note(kind: str) -> None:
    frame = sys._getframe(2)
    path = Path(frame.f_code.co_filename)
    counts[f"{kind} in {path.parent.name}/{path.name} {frame.f_code.co_name}"] += 1
    if kind == "tolist" and path.parts[-3:] == ("dsrun", "training", "loop.py"):
        steps.append(dict(counts))
        counts.clear()


def counted(owner: type, name: str, kind: str) -> None:
    real = getattr(owner, name)

    def wrapped(self, *args, **kwargs):
        note(kind)
        return real(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def install() -> None:
    import torch
    from deepspeed.accelerator import get_accelerator

    for name in READS:
        counted(torch.Tensor, name, name)
    counted(type(get_accelerator()), "synchronize", "synchronize")
    leave = os._exit

    def written(code: int) -> None:
        (Path(os.environ["WAITS"]) / f"{os.environ['RANK']}.json").write_text(json.dumps(steps))
        leave(code)

    os._exit = written


class AtTheLoop(MetaPathFinder):
    """Installs all that as training's loop is imported, before its first step."""

    def find_spec(self, name, path=None, target=None):
        if name == LOOP:
            sys.meta_path.remove(self)
            install()


if "WAITS" in os.environ:
    sys.meta_path.insert(0, AtTheLoop())
