"""Write down which arguments every optimizer and scheduler takes, from the installed DeepSpeed and PyTorch.

    python -m dsrun.config.schemas.signatures            write the file
    python -m dsrun.config.schemas.signatures --check    exit 1 with a diff if the file is not current

The rules read the file, as they must not import torch. A class of PyTorch stands under its full name
(torch.optim.SGD), one of DeepSpeed under its own (FusedAdam). takes: what may stand in `params`; needs: what
must. zero: the optimizers that ZeRO takes without zero_allow_untested_optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.metadata
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from dsrun.files import write_atomic

FILE = Path(__file__).resolve().parent / "optimizers-0.19.json"

# What the engine passes itself: _configure_basic_optimizer, _scheduler_from_config in runtime/engine.py.
PASSED = frozenset(("self", "params", "model_params", "optimizer", "adamw_mode"))

# What the engine takes out of an Adam's params, or reads from Muon's: get_optimizer_configuration and
# _configure_basic_optimizer in runtime/engine.py, set_optimizer_flags in __init__.py.
OF_ADAM = ("adam_w_mode", "fp32_optimizer_states", "torch_adam")
OF_MUON = ("adam_lr", "foreach", "muon_lr", "per_head_muon", *OF_ADAM)

Signature = dict[str, list[str]]


def signature(function: Any, extra: tuple[str, ...] = ()) -> Signature:
    """The arguments that may come from the config."""
    found = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in PASSED and parameter.kind is not parameter.VAR_KEYWORD
    }
    needs = [name for name, parameter in found.items() if parameter.default is parameter.empty]
    return {"takes": sorted({*found, *extra} - {"max_grad_norm"}), "needs": needs}


def optimizers() -> dict[str, Signature]:
    import torch.optim
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.engine import DeepSpeedEngine as Engine

    found = {kind.__name__: signature(kind, OF_ADAM) for kind in (FusedAdam, DeepSpeedCPUAdam)}
    found["ZenFlowCPUAdam"] = found["DeepSpeedCPUAdam"]  # it hands everything on
    others = (DeepSpeedCPUAdagrad, FusedLamb, DeepSpeedCPULion, FusedLion)
    found |= {kind.__name__: signature(kind) for kind in others}
    muon = {*Engine._MUON_HALF_KEYS, *Engine._ADAM_HALF_KEYS, *OF_MUON}
    found["MuonWithAuxAdam"] = {"takes": sorted(muon), "needs": []}
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer":
            found[f"torch.optim.{name}"] = signature(kind)
    return found


def schedulers() -> dict[str, Signature]:
    import torch.optim.lr_scheduler as torchs
    from deepspeed.runtime import lr_schedules

    found = {name: signature(getattr(lr_schedules, name)) for name in lr_schedules.VALID_LR_SCHEDULES}
    bases = (torchs.LRScheduler, torchs._LRScheduler)
    for name, kind in vars(torchs).items():
        if inspect.isclass(kind) and issubclass(kind, bases) and kind not in bases:
            found[f"torch.optim.lr_scheduler.{name}"] = signature(kind)
    return found


def supported() -> list[str]:
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    # is_zero_supported_optimizer adds this one when it is first asked.
    names = {"MuonWithAuxAdam"}
    for kind in ZERO_SUPPORTED_OPTIMIZERS:
        ours = kind.__module__.startswith("deepspeed")
        names.add(kind.__name__ if ours else f"torch.optim.{kind.__name__}")
    return sorted(names)


def made_from() -> dict[str, str]:
    """The versions that the file is true for."""
    return {
        name: ".".join(importlib.metadata.version(name).split(".")[:2]) for name in ("deepspeed", "torch")
    }


def render() -> str:
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed talks while it is imported
        found: dict[str, Any] = {"optimizers": optimizers(), "schedulers": schedulers(), "zero": supported()}
    found["made_from"] = made_from()
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsrun.config.schemas.signatures")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the file isn't current"
    )
    check = parser.parse_args(arguments).check
    text = render()
    if not check:
        write_atomic(FILE, text)
        return 0
    old = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    sys.stdout.writelines(
        difflib.unified_diff(old.splitlines(True), text.splitlines(True), FILE.name, "generated")
    )
    return int(old != text)


if __name__ == "__main__":
    sys.exit(main())
