"""The kernels of a fine-tune: which attention, and whether liger-kernel's are used.

Decided before the start, from what the devices are and what is installed, so that a plan knows it too. The ranks do as
the job says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dsrun import packages
from dsrun.cluster.devices import Machine
from dsrun.errors import Problem, raise_all
from dsrun.models import multimodal, transformers_code
from dsrun.models.liger import LAYERS, fuses_loss
from dsrun.options.table import ATTENTIONS, ComputeOptions
from dsrun.planner.activations import logits
from dsrun.planner.setup import Setup
from dsrun.versions import version
from dsrun.words import size_text

AUTO, SDPA, FLASH, VARLEN, EAGER = ATTENTIONS
FLASH_PACKAGES = (FLASH_PACKAGE := "flash-attn", "flash-attn-3", "flash-attn-4")
AMPERE = (8, 0)
"""The first GPUs that flash-attn 2 has kernels for: not V100 and T4."""
LIGER = "liger-kernel"
LIGER_FIRST = (0, 6, 2)
"""Its fused_linear_cross_entropy sums the gradient of the output layer in float32 (accum_dtype) since then; before, a
bf16 sum over chunks of the tokens rounded it once a chunk."""
NOT_INSTALLED = f"{LIGER} is not installed"
VOLTA = (7, 0)
"""The first GPUs that Triton, which its kernels are written in, compiles for."""


class Devices(NamedTuple):
    """A job's kind of devices. capability: of the oldest GPU; None for CPUs, or where it is not known."""

    accelerator: str
    capability: tuple[int, ...] | None


def devices_of(machine: Machine, chosen: Sequence[int], *, known: bool = True) -> Devices:
    """The kind of the chosen devices; known: the machine is the job's own, or stands for its hosts."""
    if machine.accelerator != "cuda":
        return Devices(machine.accelerator, None)
    capabilities = [gpu.compute_capability for gpu in machine.gpus if gpu.index in chosen]
    return Devices("cuda", min(capabilities) if known and capabilities else None)


class Chosen(NamedTuple):
    """The kernels of a job."""

    liger: bool = False
    """Some of liger-kernel's, for the model's type."""
    fused_loss: bool = False
    """Its loss among them."""
    missing: bool = False
    """Whether they would be taken if liger-kernel were installed."""


def chosen(
    options: ComputeOptions,
    devices: Devices,
    model_type: str | None,
    precision: str,
    *,
    official: bool = False,
) -> Chosen:
    """The kernels of a job. model_type: None where it is not known yet; official: by ChatGLM2's own recipe.

    Raises DsrunError with all that was asked for and can't be.
    """
    problems = attention_problems(options.attention, devices, precision, model_type)
    wanted = options.liger
    why, hint = "", ""
    if wanted is not False:
        why, hint = _why_not(devices, model_type, official=official)
    if wanted and why:
        problems.append(Problem(f"can't be: {why}", "--liger", hint or "Leave it out."))
    raise_all(problems)
    taken = wanted is not False and not why
    return Chosen(taken, taken and fuses_loss(model_type), wanted is None and why == NOT_INSTALLED)


def _why_not(devices: Devices, model_type: str | None, *, official: bool) -> tuple[str, str]:
    """Why none of its kernels can be used, and what would help; empty where one can."""
    if devices.accelerator != "cuda":
        return "it is for GPUs, and this job trains on CPUs", ""
    if official:
        return "--official computes as ChatGLM2's own script does", ""
    if not fuses_loss(model_type) and model_type not in LAYERS:
        return f"it is not known to fit a model of type {model_type or 'unknown'}", ""
    if devices.capability and devices.capability < VOLTA:
        return "its kernels need compute capability 7.0, and a GPU has less", ""
    there = packages.installed_version(LIGER)
    if there is None:
        return NOT_INSTALLED, f"Install it: pip install {LIGER}"
    if version(there) < LIGER_FIRST:
        first = ".".join(map(str, LIGER_FIRST))
        return f"{LIGER} {there} is installed, and it takes {first}", f"pip install --upgrade {LIGER}"
    return "", ""


def missing_note(model_type: str | None, setup: Setup | None) -> str:
    """What it costs a job that liger-kernel is missing. setup: of its plan; None where the planner has none."""
    if not fuses_loss(model_type):
        cost = "its norms and layers take less time and memory on GPUs"
    elif setup is None:
        cost = "its loss holds no logits of all tokens"
    else:
        now, then = (size_text(logits(case)) for case in (setup, setup.changed(fused_loss=True)))
        cost = f"the loss takes {now} of a GPU's memory, and would take {then}"
    return f"{NOT_INSTALLED}: {cost} (pip install {LIGER})"


def states_note(architecture: Mapping[str, Any], devices: Devices) -> str:
    """What it costs a job on GPUs that kernels of layers with a state are missing; empty where none is.

    Measured by others: 1.22 s a step without, 0.70 s with both (transformers issue 48718); four times as slow as a
    dense model of the size (LLaMA-Factory issue 10221).
    """
    kind = multimodal.text_config(architecture).get("model_type")
    if devices.accelerator != "cuda" or not isinstance(kind, str):
        return ""
    wanted = transformers_code.kernel_packages(kind)
    if not (absent := [name for name in wanted if packages.installed_version(name) is None]):
        return ""
    names = " and ".join(absent)
    verb = "is" if len(absent) == 1 else "are"
    return (
        f"{names} {verb} not installed: layers with a state are computed in plain torch, 1.7 times as long a step "
        f"where it was measured, and examples can't be packed (pip install {' '.join(absent)})"
    )


def lacks_sdpa(model_type: str | None) -> bool:
    """Whether transformers' class has no torch SDPA, so that attention is computed with a matrix of scores."""
    return model_type is not None and transformers_code.supports(model_type, transformers_code.SDPA) is False


def keeps_scores(wanted: str, architecture: Mapping[str, Any]) -> bool:
    """Whether --attention makes a matrix of scores in memory for this model."""
    return wanted == EAGER or (wanted == AUTO and lacks_sdpa(architecture.get("model_type")))


def attention_problems(
    wanted: str, devices: Devices, precision: str, model_type: str | None = None
) -> list[Problem]:
    """Problems of a kind of attention on these devices."""
    flags = {
        SDPA: transformers_code.SDPA,
        FLASH: "_supports_flash_attn",
        VARLEN: "_supports_attention_backend",
    }
    if wanted in flags and model_type and transformers_code.supports(model_type, flags[wanted]) is False:
        fault = f"can't be: transformers has none for a model of type {model_type}"
        return [Problem(fault, f"--attention {wanted}", "Leave it out: auto takes what the model has.")]
    if wanted != FLASH:
        return []
    why = ""
    if devices.accelerator != "cuda":
        why = "it is for GPUs, and this job trains on CPUs"
    elif precision == "fp32":
        why = "it computes in 16 bits, and this job in fp32"
    elif devices.capability and devices.capability < AMPERE:
        major, minor = devices.capability
        why = f"it needs compute capability 8.0, and a GPU has {major}.{minor}"
    if why:
        return [Problem(f"can't be: {why}", "--attention flash", "Take sdpa, or leave it out: auto chooses.")]
    if not any(map(packages.installed_version, FLASH_PACKAGES)):
        hint = "Install it: pip install flash-attn --no-build-isolation. Or take sdpa."
        return [Problem(f"{FLASH_PACKAGE} is not installed", "--attention flash", hint)]
    return []
