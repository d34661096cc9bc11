"""What ranks send one another: gradients beside the backward, where DeepSpeed does it right; and rounded numbers.

ZeRO-1 and 2 reduce gradients beside the backward (`why_overlap`). ZeRO++ sends 8-bit weights and 4-bit gradients (qwZ,
qgZ); `rounding_problems` says where that would do harm, or no good, or was never tried. What the config alone shows is
for its rules (DS241 to DS246, DS269, DS270); what the job shows is here: its hosts, its model, what else it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dsrun import packages
from dsrun.config.presets import preset
from dsrun.config.rules.zero.buckets import FIXED_OVERLAP
from dsrun.config.rules.zero.zeropp import FIXED_QUANTISER
from dsrun.ds_config import ZERO, offloads, rounding, section
from dsrun.errors import Problem
from dsrun.job.job import HostDevices, world_size_of
from dsrun.options.table import ParallelismOptions
from dsrun.planner.shape import Shape
from dsrun.versions import version

PATH = "zero_optimization.overlap_comm"
OVERLAP = f"{PATH}=true"
MULTIPLE = 8
"""Elements of a rank's share of a weight have to be a multiple of that (CUDAQuantizer, partition_parameters.py)."""
EXACT = "Take --preset zero3-hpz, which is exact."


def why_overlap(
    ds_config: Mapping[str, Any], name: str, accelerator: str, ranks: int, overrides: Iterable[str]
) -> str:
    """Why a shipped preset's overlap_comm is switched on; empty where it stays.

    The presets have it off: before FIXED_OVERLAP buckets were read while they were filled (rule DS202). Where somebody
    says it, or the optimizer is offloaded, whose copies have streams of their own, nothing changes.
    """
    zero = ds_config.get("zero_optimization", {})
    if accelerator != "cuda" or ranks < 2 or zero.get("stage") not in (1, 2) or zero.get("overlap_comm"):
        return ""
    if zero.get("offload_optimizer") or any(text.startswith(PATH) for text in overrides):
        return ""
    there = packages.installed_version("deepspeed")
    if not preset.load(name).shipped or there is None or version(there) < FIXED_OVERLAP:
        return ""
    return f"deepspeed {there} reduces gradients beside the backward without the faults of earlier ones"


def rounding_problems(
    ds_config: Mapping[str, Any],
    preset: str,
    *,
    accelerator: str,
    hosts: Sequence[HostDevices],
    shape: Shape | None,
    precision: str | None,
    parallel: ParallelismOptions,
    overrides: Sequence[str] = (),
) -> Iterator[Problem]:
    """Problems of a config that has ranks round what they send. hosts: none where they aren't known yet."""
    keys = rounding(ds_config)
    if not keys:
        return
    where = f"preset {preset}: {keys[0]}"
    if accelerator == "cpu":
        yield Problem("needs NVIDIA GPUs: DeepSpeed's quantiser is a CUDA kernel", where, EXACT)
    named = any(text.startswith(f"{ZERO}.{keys[0]}=") for text in overrides)
    if len(hosts) == 1 and not named:
        hint = f"Take --preset zero3. --set {ZERO}.{keys[0]}=true takes it all the same."
        yield Problem("rounds what hosts send one another, and there is one host", where, hint)
    if precision == "fp32":
        yield Problem("rounds weights to 8 bits, and the job trains in fp32", where, EXACT)
    there = packages.installed_version("deepspeed")
    if precision == "bf16" and () < version(there or "") < FIXED_QUANTISER:
        fixed = ".".join(map(str, FIXED_QUANTISER))
        yield Problem(
            f"deepspeed {there} takes bf16 weights for fp16", where, f"Install {fixed} or newer. {EXACT}"
        )
    if parallel.group > 1:
        yield Problem(f"was not tried together with {parallel.words}", where, EXACT)
    if offloads(ds_config):
        yield Problem("was not tried together with offload", where, EXACT)
    if "zero_quantized_gradients" in keys and len({len(host.devices) for host in hosts}) > 1:
        # Its groups are made of this host's number of GPUs (_get_local_all_to_all_group, utils/groups.py).
        yield Problem(
            "takes as many GPUs on every host", where, "Use as many on each (--gpus), or zero3-qwz."
        )
    yield from _shares(ds_config, where, world_size_of(hosts) if hosts else 0, shape)


def _shares(ds_config: Mapping[str, Any], where: str, ranks: int, shape: Shape | None) -> Iterator[Problem]:
    """The problem of a weight that ranks can't share: an assertion would end every rank in the first forward."""
    kept_whole = section(ds_config, ZERO).get("stage3_param_persistence_threshold", 100_000)
    for size in shape.matrices if shape and ranks else ():
        share = -(-size // ranks)
        if size > kept_whole and share % MULTIPLE:
            what = f"{ranks} ranks have {share:,} elements each of a weight of {size:,}, no multiple of {MULTIPLE}"
            yield Problem(what, where, f"Take a number of GPUs that divides it better. {EXACT}")
            return
