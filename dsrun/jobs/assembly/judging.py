"""What a config is judged for: a version of DeepSpeed, devices, a model, what the trainer is told."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dsrun.config.rules import Setting
from dsrun.config.rules.frame import ModelInfo
from dsrun.config.schemas import schema
from dsrun.errors import DsrunError

CPU = "cpu"


def setting_of(
    environ: Mapping[str, str],
    *,
    world_size: int | None = None,
    nodes: int | None = None,
    gpu: str | None = None,
    model: str | None = None,
    deepspeed_version: str | None = None,
    upgrade_to: str | None = None,
    beside: Mapping[str, str] | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> tuple[Setting, str]:
    """The setting, and a note where DeepSpeed's version is judged as another one (empty otherwise).

    gpu: a kind of GPU, or cpu. model: a name from `dsrun models`, a folder or a config.json. beside: versions of
    packages, by name. trainer: TrainingArguments by name. Raises DsrunError for what isn't known or can't be.
    """
    from dsrun.planner import gpus

    beside = beside or {}
    release, oldest = _release(deepspeed_version, upgrade_to, beside.get("deepspeed"))
    version = schema.version_of(release) if release else None
    name = gpu or (CPU if environ.get("DS_ACCELERATOR") == CPU else None)
    kind = gpus.load(name) if name not in (None, CPU) else None
    setting = Setting(
        world_size=world_size,
        nodes=nodes,
        version=version,
        versions={**beside, "deepspeed": _whole(release)} if beside and release else None,
        upgrade_from=oldest,
        device="cuda" if kind else name,
        bf16=kind.bf16 if kind else None,
        fp16=kind.takes_fp16(environ) if kind else None,
        gpu_memory_gib=kind.memory_gib if kind else None,
        trainer=trainer,
        model=_model(model) if model else None,
    )
    if not release or not version or version >= schema.plain_version(release):
        return setting, ""
    which = "newest" if version == schema.newest() else "last before it"
    return (
        setting,
        f"DeepSpeed {release} is judged as {schema.name_of(version)}, the {which} that dsrun knows",
    )


def _release(
    requested: str | None, upgrade: str | None, beside: str | None
) -> tuple[str | None, schema.Version | None]:
    """The release of DeepSpeed that is judged for, and that which the config was written for, where they differ."""
    if beside and requested and requested != beside:
        hint = "Leave one of them out."
        raise DsrunError(f"is {requested}, and --with says {beside}", where="--deepspeed-version", hint=hint)
    requested = requested or beside
    if not upgrade:
        return requested or _installed(), None
    if requested and schema.version_of(upgrade) < schema.version_of(requested):
        hint = "Name the newer one there."
        raise DsrunError(f"{upgrade} is older than {requested}", where="--upgrade-to", hint=hint)
    return upgrade, schema.version_of(requested) if requested else schema.oldest()


def _whole(release: str) -> str:
    """A version of DeepSpeed with its patch: "0.19" is judged as its newest, here as by the schema."""
    return release if len(schema.plain_version(release)) > 2 else schema.name_of(schema.version_of(release))


def _installed() -> str | None:
    """The installed DeepSpeed's release; None where there is none, or one without a schema."""
    from dsrun import versions

    version = versions.installed().get("deepspeed")
    with suppress(DsrunError):
        if version and schema.version_of(version):
            return version
    return None


def _model(name: str) -> ModelInfo:
    """The sizes in a model file, or in a checkpoint's config.json."""
    from dsrun.models import multimodal, resolve
    from dsrun.models.text_shape import shape_of
    from dsrun.planner.model_config import ModelConfig, UnknownShapeError
    from dsrun.planner.shape import EXPERT_COUNTS

    config, _, _ = resolve.config_of(name)
    text = multimodal.text_config(config)
    whole = {key: value for key, value in text.items() if not isinstance(value, (list, dict))}
    reader = ModelConfig(whole, name)  # some have a size of each block: those are not looked at
    hidden, rows, heads = map(reader.size, ("hidden_size", "vocab_size", "num_attention_heads"))
    inner = reader.size("intermediate_size") or 0
    experts = reader.size(*EXPERT_COUNTS, least=0) or 0
    reader.check()
    largest = hidden * max(rows, inner) if hidden and rows else None
    parameters = None
    with suppress(UnknownShapeError):  # some networks aren't counted, such as a mixture of experts
        parameters = shape_of(config, name).parameters
    kind = text.get("model_type")
    return ModelInfo(
        hidden or 0, heads, largest, parameters, kind if isinstance(kind, str) else None, experts
    )
