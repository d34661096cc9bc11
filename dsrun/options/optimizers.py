"""Every optimizer of --optimizer, once: its parameters, DeepSpeed's name for it, the bytes of its states.

The option's choices, the checks before the start, the ranks that make it and the planner read this table. An optimizer
that steps each weight by itself is an entry here and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Optimizer:
    """One value of --optimizer."""

    state_bytes: tuple[float, float]
    """Bytes of its states for each weight, in fp32 and in 16 bits."""
    types: tuple[str, ...] = ()
    """Its types in an optimizer section of the config, in small letters."""
    made_by: str = ""
    """MODULE:CLASS where the ranks make it and hand it to DeepSpeed; empty where DeepSpeed does, from the config."""
    fsdp: str = ""
    """MODULE:CLASS of one that steps FSDP's sharded tensors; empty where there is none."""
    takes: tuple[str, ...] = ()
    """The parameters of that class that a config may give."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Its parameters where the config has none."""
    package: str = ""
    """The package that has to be installed for it."""


ADAM_TAKES = ("lr", "betas", "eps", "weight_decay")
WHICH_ADAM = ("torch_adam", "adam_w_mode")
"""Parameters that only say which Adam of DeepSpeed's it is."""
ADAMW, ADAMW_8BIT, MUON = "adamw", "adamw-8bit", "muon"
OPTIMIZERS = {
    ADAMW: Optimizer(  # two moments
        (8, 4), types=("adam", "adamw"), fsdp="torch.optim:AdamW", takes=ADAM_TAKES, defaults={"weight_decay": 0.0}
    ),
    ADAMW_8BIT: Optimizer(  # both in a byte each, whatever the weights are
        (2, 1), made_by="bitsandbytes.optim:AdamW8bit", takes=ADAM_TAKES, package="bitsandbytes"
    ),
    "sgd": Optimizer(
        (4, 2), types=("sgd",), made_by="torch.optim:SGD", fsdp="torch.optim:SGD",
        takes=("lr", "momentum", "dampening", "nesterov", "weight_decay"), defaults={"momentum": 0.9},
    ),
    # DeepSpeed has Lion for GPUs and for host memory only, where it has to be compiled. Defaults: arXiv:2302.06675.
    "lion": Optimizer(
        (4, 2), types=("lion",), made_by="dsrun.training.engines.lion:Lion",
        fsdp="dsrun.training.engines.lion:Lion",
        takes=("lr", "betas", "weight_decay"), defaults={"betas": [0.9, 0.99]},
    ),
    MUON: Optimizer((4, 2), types=("muon",)),  # one moment of matrices, which are nearly all weights
}  # fmt: skip
TYPES = {kind: name for name, optimizer in OPTIMIZERS.items() for kind in optimizer.types}
"""An optimizer section's type in small letters -> the option's name for it; others are the config's own affair."""
