"""Write down which arguments every optimizer and scheduler takes, from the installed DeepSpeed and PyTorch.

    python -m tools.schemas.signatures            write the file
    python -m tools.schemas.signatures --check    exit 1 with a diff if the file is not current

The rules read the file, as they must not import torch. A class of PyTorch stands under its full name
(torch.optim.SGD), one of DeepSpeed under its own (FusedAdam). takes: what may stand in `params`; needs: what
must. zero: the optimizers that ZeRO takes without zero_allow_untested_optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import sys
from typing import Any

from tools.schemas.generate import PACKAGED, text_of, write_or_check

FILE = PACKAGED / "optimizers.json"

PASSED = frozenset(("self", "params", "model_params", "optimizer", "adamw_mode"))
"""What the engine passes itself: _configure_basic_optimizer, _scheduler_from_config in runtime/engine.py."""

OF_ADAM = ("adam_w_mode", "fp32_optimizer_states", "torch_adam")
OF_MUON = ("adam_lr", "foreach", "muon_lr", "per_head_muon", *OF_ADAM)
"""What the engine takes out of an Adam's params, or reads from Muon's: get_optimizer_configuration and
_configure_basic_optimizer in runtime/engine.py, set_optimizer_flags in __init__.py."""

ADAMS = ("FusedAdam", "DeepSpeedCPUAdam")
OTHERS = (
    "deepspeed.ops.adagrad:DeepSpeedCPUAdagrad",
    "deepspeed.ops.lamb:FusedLamb",
    "deepspeed.ops.lion:DeepSpeedCPULion",
    "deepspeed.ops.lion:FusedLion",
)

Signature = dict[str, list[str]]


def load(target: str) -> Any:
    """The object behind "module:name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def signature(function: Any, extra: tuple[str, ...] = ()) -> Signature:
    """The arguments that may come from the config."""
    found = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in PASSED and parameter.kind is not parameter.VAR_KEYWORD
    }
    needs = [name for name, parameter in found.items() if parameter.default is parameter.empty]
    return {"takes": sorted({*found, *extra} - {"max_grad_norm"}), "needs": needs}


def classes(module: str, *bases: str) -> dict[str, Any]:
    """The classes of a module that derive from one of its `bases`, without these."""
    names = vars(importlib.import_module(module))
    tops = tuple(names[base] for base in bases)
    kinds = {name: kind for name, kind in names.items() if inspect.isclass(kind) and kind not in tops}
    return {f"{module}.{name}": kind for name, kind in kinds.items() if issubclass(kind, tops)}


def optimizers() -> dict[str, Signature]:
    found = {name: signature(load(f"deepspeed.ops.adam:{name}"), OF_ADAM) for name in ADAMS}
    found["ZenFlowCPUAdam"] = found["DeepSpeedCPUAdam"]  # it hands everything on
    found |= {target.partition(":")[2]: signature(load(target)) for target in OTHERS}
    engine = load("deepspeed.runtime.engine:DeepSpeedEngine")
    muon = {*engine._MUON_HALF_KEYS, *engine._ADAM_HALF_KEYS, *OF_MUON}
    found["MuonWithAuxAdam"] = {"takes": sorted(muon), "needs": []}
    return found | {name: signature(kind) for name, kind in classes("torch.optim", "Optimizer").items()}


def schedulers() -> dict[str, Signature]:
    own = load("deepspeed.runtime.lr_schedules:VALID_LR_SCHEDULES")
    found = {name: signature(load(f"deepspeed.runtime.lr_schedules:{name}")) for name in own}
    torchs = classes("torch.optim.lr_scheduler", "LRScheduler", "_LRScheduler")
    return found | {name: signature(kind) for name, kind in torchs.items()}


def supported() -> list[str]:
    # is_zero_supported_optimizer adds this one when it is first asked.
    names = {"MuonWithAuxAdam"}
    for kind in load("deepspeed.runtime.zero.utils:ZERO_SUPPORTED_OPTIMIZERS"):
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
        found = {
            "made_from": made_from(),
            "optimizers": dict(sorted(optimizers().items())),
            "schedulers": dict(sorted(schedulers().items())),
            "zero": supported(),
        }
    return text_of(found) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.schemas.signatures")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it isn't current")
    return write_or_check(FILE, render(), check=parser.parse_args(arguments).check)


if __name__ == "__main__":
    sys.exit(main())
