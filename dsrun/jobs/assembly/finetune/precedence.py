"""The sources that give a fine-tune's options their values, in the order in which one depends on another.

How strong a source is says `Source`, whatever the order. The command line and a run file come first: they are read with
the command, and all others look at them. What depends on examples or devices follows when these are known: lengths
(lengths.py), precision and tiles (devices.py), the layout or preset that is chosen, the split of a step and what memory
has room for (config.py), and the run's folder, named after them (folder.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dsrun.config.presets.preset import load
from dsrun.config.presets.preset_options import by_overrides, by_preset
from dsrun.data.conversations import AUTO
from dsrun.jobs.assembly.checks import optimizers
from dsrun.models import model_files
from dsrun.models.peft_methods import by_adapter
from dsrun.options import derived
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import select
from dsrun.options.layers import (
    NOTHING,
    Layer,
    Resolved,
    Source,
    SourceOfValues,
    from_environment,
)
from dsrun.options.table import ParallelismOptions

Sources = Sequence[SourceOfValues[FinetuneOptions]]
WITHOUT_OFFLOAD = "zero3"
"""The preset that takes the least memory of those that keep everything on the devices."""
OF_ADAPTER: Sources = (by_adapter,)
"""Before the model's file, whose defaults are for another method than an adapter may be of."""


def of_model(name: str, defaults: Mapping[str, Any], weights: float | None) -> Sources:
    """Sources of values that follow from the model. defaults: of its file; weights: how many it has, None where
    nobody knows."""
    return (
        partial(derived.by_model_file, defaults=defaults, where=model_files.file_label(name)),
        derived.by_method,  # the model's file may name the method
        partial(derived.by_size, weights=weights),  # and the method says whether its size counts
    )


def of_strategy(environ: Mapping[str, str]) -> Sources:
    """Sources of values that follow from how it is trained; they come after the model's file."""
    return (
        lambda _: from_environment(FinetuneOptions, environ, "nvme_path"),
        lambda known: by_overrides(known, known.options.overrides),
        # These two may put another preset in a default's place, so they come before the preset's own values.
        derived.by_pipeline,
        _by_shared_examples,
        lambda known: [] if known.options.preset == AUTO else by_preset(known.options.preset),
        derived.by_recipe,  # it refuses what a lab's preset contradicts it in
        derived.by_max_length,
        derived.by_optimizer,  # which the preset or --set may name
        derived.by_loss,  # which the recipe may name
    )


def _by_shared_examples(known: Resolved[FinetuneOptions]) -> Layer:
    """A default preset that offloads gives way where several ranks work on the same examples; one that was asked for is
    refused (checks.parallelism)."""
    preset, alone = known.options.preset, select(ParallelismOptions, known.options).group == 1
    stays = preset == AUTO or alone or known.source("preset") > Source.MODEL_FILE
    if stays or not optimizers.offloads(load(preset).merged("deepspeed")[0]):
        return NOTHING
    note = f"preset {WITHOUT_OFFLOAD} in the place of {preset}, which --tp and --sp are not tried with"
    return Layer.settled({"preset": WITHOUT_OFFLOAD}, "--tp and --sp are not tried with offload", note)
