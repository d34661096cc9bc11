"""Values in a preset or --set that are options of their own: batch, clipping, learning rate, precision.

There is one truth for each: a lab's preset that says a micro batch gives it to everything that is started with it, and
--set stands on the command line like the option itself.
"""

from __future__ import annotations

from dsrun import catalog
from dsrun.config import tree
from dsrun.config.presets import overrides, preset
from dsrun.config.presets.options import PLACES
from dsrun.errors import Problem, raise_all
from dsrun.options.declare import T, entries
from dsrun.options.derived import step_of
from dsrun.options.layers import Layer, Resolved, Source
from dsrun.options.table import OptimizerOptions


def by_preset(name: str) -> list[Layer]:
    """The layers of a preset's files, from its base to itself. Raises DsrunError for a preset that is none.

    A file is the origin of a value only where it changes it: one that repeats its base's value is not.
    """
    config: dict[str, object] = {}
    before: dict[str, object] = {"optimizer": OptimizerOptions.optimizer}
    shipped = catalog.shipped_root() / "presets"
    layers = []
    for file in preset.load(name).chain:
        config = tree.merge(config, file.config)
        now = step_of(config)
        new = {key: value for key, value in now.items() if before.get(key) != value} | file.defaults
        source = Source.SHIPPED_PRESET if file.path.is_relative_to(shipped) else Source.LAB_PRESET
        layers.append(Layer(source, new, file.label))
        before = now
    return layers


def by_overrides(known: Resolved[T], texts: tuple[str, ...]) -> Layer:
    """The layer of the options that --set gives.

    Raises DsrunError for a text that is wrong, and where an option of the same or a stronger source has another value.
    """
    config: dict[str, object] = {}
    for path, value in overrides.parse(texts, "deepspeed").items():
        tree.put(config, path, value)
    values = step_of(config)
    shown = {**values, "optimizer": tree.get(config, "optimizer.type")}
    declared, origin = entries(type(known.options)), known.origins["overrides"]
    problems = [
        Problem(
            f"{declared[name].flag} is {getattr(known.options, name)}, and --set {_path(name)} says {shown[name]}",
            "--set",
            "Give one of them.",
        )
        for name, value in values.items()
        if known.source(name) >= origin.source and getattr(known.options, name) != value
    ]
    raise_all(problems)
    where = f"{origin.where}: --set".removeprefix(": ")
    return Layer(origin.source, values, where, through="overrides")


def _path(name: str) -> str:
    elsewhere = {"precision": "fp16 or bf16", "lr_schedule": "scheduler", "optimizer": "optimizer.type"}
    return elsewhere.get(name) or PLACES[name][1]
