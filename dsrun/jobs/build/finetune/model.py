"""Which model, and what its file, its method, the preset and the reference recipe say of the options."""

from __future__ import annotations

from dsrun.config.presets.preset import load
from dsrun.config.presets.preset_options import with_overrides, with_preset
from dsrun.data.conversations import AUTO
from dsrun.errors import collected
from dsrun.jobs.build.checks import optimizers
from dsrun.jobs.build.finetune.draft import Draft
from dsrun.jobs.spec.job import ModelSpec
from dsrun.models import model_files, peft_methods, resolve
from dsrun.options import derived
from dsrun.options.table import Source

WITHOUT_OFFLOAD = "zero3"
"""The preset that takes the least memory of those that keep everything on the devices."""


def take_adapter(draft: Draft) -> None:
    """What an adapter that is trained on says of itself: method, rank, length of the prefix."""
    draft.asked = peft_methods.with_adapter(draft.asked)


def find_model(draft: Draft) -> None:
    """The model, and the defaults that its file and its method bring."""
    draft.asked = derived.by_method(draft.asked)
    draft.model, defaults = resolve.resolve(draft.name, draft.options.model_path)
    draft.dataset = defaults.get("dataset")
    where = model_files.file_label(draft.model.name)
    method = draft.asked.filled(Source.MODEL_FILE, {"method": defaults.get("method")}, where).options.method
    own = derived.of_model_file({k: v for k, v in defaults.items() if k != "dataset"}, method)
    draft.asked = derived.by_method(draft.asked.filled(Source.MODEL_FILE, own, where))
    draft.asked = derived.by_size(draft.asked, draft.shape.parameters if draft.shape else None)


def settle_options(draft: Draft) -> None:
    """What the environment, the preset, --set and the reference recipe say of the options."""
    draft.asked = draft.asked.from_environment(draft.environ, "nvme_path")
    options = draft.options
    draft.asked = with_overrides(draft.asked, options.overrides)
    draft.asked, gave_way = derived.by_pipeline(draft.asked)
    draft.notes += [gave_way] if gave_way else []
    options = draft.options
    if options.preset != AUTO:
        _keep_on_devices(draft)
        draft.asked = with_preset(draft.asked, draft.options.preset)
    draft.asked = derived.by_loss(derived.by_optimizer(derived.by_recipe(draft.asked)))
    draft.preset = draft.options.preset


def _keep_on_devices(draft: Draft) -> None:
    """A default preset that offloads gives way where several ranks work on the same examples; one that was asked for is
    refused (checks.parallelism)."""
    preset = draft.options.preset
    if draft.parallel.group == 1 or draft.asked.source("preset") > Source.MODEL_FILE:
        return
    if optimizers.offloads(load(preset).merged("deepspeed")[0]):
        draft.asked = draft.asked.settled(
            {"preset": WITHOUT_OFFLOAD}, "--tp and --sp are not tried with offload"
        )
        draft.notes.append(
            f"preset {WITHOUT_OFFLOAD} in the place of {preset}, which --tp and --sp are not tried with"
        )


def check_model(draft: Draft) -> None:
    """Whether the model can be trained that way, and exported as asked."""
    export_format, peft = draft.options.export_format, draft.peft
    with collected(draft.problems):
        if draft.model:
            resolve.check_export_format(draft.model, export_format)
    draft.problems += [*peft_methods.check_export(peft, export_format), *peft_methods.check_packages(peft)]
    draft.problems += peft_methods.check_attention(peft, draft.options.attention)
    if draft.model:
        draft.problems += peft_methods.check_targets(peft, resolve.architecture(draft.model))


def positions_of(model: ModelSpec) -> int | None:
    """The longest sequence that the model was made for, in tokens; None where its config says nothing."""
    found = resolve.architecture(model).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None
