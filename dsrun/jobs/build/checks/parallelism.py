"""Which combinations of parallelism finetune trains with: those that were compared, number by number, with one process.

Everything else is refused before the start, by the functions of RULES; the tables in docs/reference/parallelism.md are
made by asking them, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsrun.errors import Problem
from dsrun.models import tensor_parallel
from dsrun.options.groups import OptimizerOptions, ParallelismOptions
from dsrun.options.optimizers import ADAMW, OPTIMIZERS

ELEMENTWISE = tuple(name for name in OPTIMIZERS if name in (ADAMW, "sgd", "lion"))
"""Optimizers for which a part of a matrix is stepped as it would be in the whole one."""
TOKEN_MEAN = OptimizerOptions.loss
SHARED = (*tensor_parallel.NETWORKS,)
"""Networks whose sequences are divided as tokens of one process are computed."""


@dataclass(frozen=True, kw_only=True)
class ParallelSetup:
    """What of a fine-tune decides whether its kind of parallelism works."""

    parallel: ParallelismOptions
    devices: tuple[int, ...]
    """Ranks of each host."""
    stage: int = 2
    """ZeRO's."""
    fsdp: bool = False
    """Whether the preset is FSDP's, and DeepSpeed has no part in it."""
    offload: bool = False
    """Whether the optimizer or the weights are kept outside the GPU."""
    method: str = "full"
    """What is trained."""
    optimizer: str = ADAMW
    loss: str = TOKEN_MEAN
    attention: str = "auto"
    packing: bool = True
    official: bool = False
    network: str | None = "llama"
    """model_type; None where it isn't known yet."""
    heads: int | None = None
    kv_heads: int | None = None

    @property
    def world_size(self) -> int:
        """Ranks over all hosts."""
        return sum(self.devices)


def heads_of(architecture: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Attention heads of a transformers config, and those of keys and values; None for what it doesn't say."""
    heads = architecture.get("num_attention_heads")
    return heads, architecture.get("num_key_value_heads") or heads


def refusals(setup: ParallelSetup) -> list[Problem]:
    """A problem for each reason why the job can't be trained like that, with the nearest that can. Empty if it can."""
    first = list(two_at_once(setup))
    return first or [problem for rule in RULES for problem in rule(setup)]


def notes(setup: ParallelSetup) -> list[str]:
    """What works, and is worth a word."""
    tp, kv_heads = setup.parallel.tp, setup.kv_heads
    if kv_heads and tp > kv_heads:
        return [
            f"--tp {tp}: {tp - kv_heads} of {tp} ranks have no part of the attention: {kv_heads} key/value heads"
        ]
    return []


def groups(setup: ParallelSetup) -> Iterator[Problem]:
    """Ranks that work on the same examples make whole groups, each on one host."""
    size, option = setup.parallel.group, _asked(setup.parallel)
    if setup.world_size % size:
        yield Problem(
            f"{setup.world_size} ranks don't make groups of {size}", option,
            f"{_nearest(size, setup.world_size)}, or take {-(-setup.world_size // size) * size} devices.",
        )  # fmt: skip
    elif split := [count for count in setup.devices if count % size]:
        yield Problem(
            f"a group of {size} ranks would lie on two hosts, one of which has {split[0]} ranks", option,
            "Its ranks exchange what every layer computes: take a divisor of each host's devices.",
        )  # fmt: skip


def divided_networks(setup: ParallelSetup) -> Iterator[Problem]:
    """AutoTP divides what its patterns name; only for these networks the result was compared."""
    if setup.parallel.tp > 1 and setup.network is not None and setup.network not in tensor_parallel.NETWORKS:
        yield Problem(
            f"{setup.network} is not known to be divided rightly", f"--tp {setup.parallel.tp}",
            f"Networks that are: {', '.join(tensor_parallel.NETWORKS)}. Without --tp, zero3 divides the weights.",
        )  # fmt: skip


def divided_heads(setup: ParallelSetup) -> Iterator[Problem]:
    """Every rank has whole heads; beside LoRA equally many."""
    tp, heads, kv_heads = setup.parallel.tp, setup.heads, setup.kv_heads
    if heads is None or kv_heads is None or tp == 1:
        return
    if tp > heads:
        what = f"the model has {heads} attention heads"
        yield Problem(what, f"--tp {tp}", f"{_nearest(tp, kv_heads)}.")
    elif setup.method != "full" and (heads % tp or kv_heads % tp):
        what = f"{heads} attention heads and {kv_heads} of keys and values are no equal shares for LoRA"
        yield Problem(what, f"--tp {tp}", f"{_nearest(tp, kv_heads)}.")


def divided_methods(setup: ParallelSetup) -> Iterator[Problem]:
    """A prefix has keys and values of all heads, and weights in 4 bits are no matrices."""
    if setup.parallel.tp > 1 and setup.method not in ("full", "lora"):
        what = f"can't be divided under --method {setup.method}"
        yield Problem(what, f"--tp {setup.parallel.tp}", "Take --method lora, or leave --tp out.")


def divided_optimizers(setup: ParallelSetup) -> Iterator[Problem]:
    """Muon orthogonalises a whole matrix; 8-bit states have blocks that a part cuts otherwise."""
    if setup.parallel.tp > 1 and setup.optimizer not in ELEMENTWISE:
        what = f"a part of a matrix is not stepped as the whole one by --optimizer {setup.optimizer}"
        yield Problem(what, f"--tp {setup.parallel.tp}", f"Take one of {', '.join(ELEMENTWISE)}.")


def another_engine(setup: ParallelSetup) -> Iterator[Problem]:
    """Both are DeepSpeed's."""
    if setup.parallel.group > 1 and setup.fsdp:
        yield Problem("is DeepSpeed's, and the preset FSDP's", _asked(setup.parallel), "Take --preset zero3.")


def two_at_once(setup: ParallelSetup) -> Iterator[Problem]:
    """AutoTP replaces the groups that Ulysses hands to DeepSpeed (runtime/engine.py)."""
    if setup.parallel.tp > 1 and setup.parallel.sp > 1:
        yield Problem("can't be combined", _asked(setup.parallel), "Take one of the two.")


def shared_networks(setup: ParallelSetup) -> Iterator[Problem]:
    """Networks whose results were compared."""
    if setup.parallel.sp > 1 and setup.network is not None and setup.network not in SHARED:
        what = f"{setup.network} is not known to be right with its sequences divided"
        yield Problem(what, f"--sp {setup.parallel.sp}", f"Networks that are: {', '.join(SHARED)}.")


def shared_heads(setup: ParallelSetup) -> Iterator[Problem]:
    """Ranks exchange tokens for whole heads, equally many each; heads of keys and values may be repeated."""
    sp, heads, kv_heads = setup.parallel.sp, setup.heads, setup.kv_heads
    if sp == 1 or heads is None or kv_heads is None:
        return
    if heads % sp or (kv_heads % sp and sp % kv_heads):
        what = (
            f"{heads} attention heads, {kv_heads} of keys and values, can't be shared equally by {sp} ranks"
        )
        yield Problem(what, f"--sp {sp}", f"{_nearest(sp, math.gcd(heads, kv_heads))}.")


def shared_attention(setup: ParallelSetup) -> Iterator[Problem]:
    """DeepSpeed's wrapper throws masks away: packed examples are kept apart by dsrun's own attention alone."""
    if setup.parallel.sp > 1 and setup.attention not in ("auto", "varlen"):
        what = f"--attention {setup.attention} is not told where the examples of a divided sequence begin"
        yield Problem(what, f"--sp {setup.parallel.sp}", "Take --attention varlen, or leave it out.")


def shared_examples(setup: ParallelSetup) -> Iterator[Problem]:
    """A micro batch is one packed sequence, of which each rank has its tokens; the recipe counts examples."""
    option = f"--sp {setup.parallel.sp}"
    if setup.parallel.sp == 1:
        return
    if setup.official:
        yield Problem("--official packs nothing", option, "Leave one of the two out.")
    elif setup.loss != TOKEN_MEAN:
        yield Problem(f"--loss {setup.loss} packs nothing", option, f"Take --loss {TOKEN_MEAN}.")
    elif not setup.packing:
        yield Problem(
            "a micro batch is one packed sequence", option, "Leave --no-packing out: losses are the same."
        )


def shared_methods(setup: ParallelSetup) -> Iterator[Problem]:
    """A prefix has keys and values of no place in the sequence; QLoRA was not compared."""
    if setup.parallel.sp > 1 and setup.method not in ("full", "lora"):
        what = f"was not tried with --method {setup.method}"
        yield Problem(what, f"--sp {setup.parallel.sp}", "Take --method lora, or leave --sp out.")


def offloading(setup: ParallelSetup) -> Iterator[Problem]:
    """Nobody has compared it yet."""
    if setup.parallel.group > 1 and setup.offload:
        what = "not tried together with offload"
        yield Problem(
            what, _asked(setup.parallel), f"Take --preset zero{max(setup.stage, 2)}, which offloads nothing."
        )


Rule = Callable[[ParallelSetup], Iterator[Problem]]
RULES: tuple[Rule, ...] = (
    groups, another_engine, divided_networks, divided_heads, divided_methods, divided_optimizers,
    shared_networks, shared_heads, shared_attention, shared_examples, shared_methods, offloading,
)  # fmt: skip


def with_section(
    ds_config: dict[str, Any], network: str | None, parallel: ParallelismOptions
) -> dict[str, Any]:
    """The config with what DeepSpeed has to be told: how the model is divided."""
    if parallel.tp == 1 or network is None:
        return ds_config
    return {**ds_config, tensor_parallel.SECTION: tensor_parallel.section(network, parallel.tp)}


def _asked(parallel: ParallelismOptions) -> str:
    sizes = {"--tp": parallel.tp, "--sp": parallel.sp}
    return " ".join(f"{option} {size}" for option, size in sizes.items() if size > 1)


def _nearest(wanted: int, whole: int) -> str:
    """The divisor of a number that is nearest to the size that was asked for, as a piece of advice."""
    near = min(
        (size for size in range(1, whole + 1) if whole % size == 0), key=lambda size: abs(size - wanted)
    )
    return "Leave it out" if near == 1 else f"The nearest that fits: {near}"
