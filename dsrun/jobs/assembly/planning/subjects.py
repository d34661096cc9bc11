"""The model that is planned for, and the lengths of the examples that it is to be trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.errors import DsrunError, raise_all
from dsrun.models import model_files, multimodal, resolve, trainable
from dsrun.models.text_shape import shape_of
from dsrun.options.commands import PlanOptions
from dsrun.options.declare import entries, flag_of, select
from dsrun.options.layers import Resolved, Source
from dsrun.planner import shapes
from dsrun.planner.families import FAMILIES
from dsrun.planner.model_config import UnknownShapeError
from dsrun.planner.shape import Shape, described, from_numbers, stated

if TYPE_CHECKING:
    from dsrun.data.sequence_lengths import ExampleLength, SequenceLengths

NUMBERS = ("params", "hidden", "layers", "intermediate", "heads", "kv_heads", "vocab")


@dataclass(frozen=True)
class PlanSubject:
    """The model that is planned for. defaults: its file's own training values; folder: its own, where it has one;
    architecture: its config, empty where only numbers are known."""

    name: str
    shape: Shape
    defaults: Mapping[str, Any]
    folder: Path | None = None
    architecture: Mapping[str, Any] = field(default_factory=dict)


def subject(model: str | None, options: PlanOptions | None = None) -> PlanSubject:
    """The model: a name from `dsrun models`, a folder or config.json, or --params and the options beside it.

    Raises DsrunError for a model that is unknown, or that the planner doesn't describe.
    """
    given = {name: getattr(options, name) for name in NUMBERS} if options else {}
    numbers = {name: value for name, value in given.items() if value is not None}
    if model is None:
        if "params" not in numbers:
            raise DsrunError("no model is named", hint="Name one (`dsrun models`), or give --params 6.2e9.")
        parameters = numbers.pop("params")
        shape = from_numbers(parameters, **numbers)
        return PlanSubject(f"{parameters / 1e9:.4g}e9 parameters", shape, {})
    if numbers:
        names = ", ".join(flag_of(PlanOptions, name) for name in numbers)
        raise DsrunError(f"{model} says what {names} would say", hint="Name a model, or give its numbers.")
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        raise DsrunError(
            "is a GGUF file: its shape is not read",
            where=model,
            hint="Give its numbers: --params 1.1e9 --hidden 2048",
        )
    try:
        config, where, named = resolve.config_of(model)
    except DsrunError:
        # A name of a released network, without its config: its shape is known.
        if (fields := shapes.find(model)) is None or path.exists():
            raise
        shape, _ = shapes.shape(model, None)
        return PlanSubject(model, shape, {}, architecture={"model_type": "llama", **fields.get("config", {})})
    traced = bool(options and options.trace)
    if named:
        shape = _shape(config, where, named.parameters, folder=None, traced=traced)
        return PlanSubject(named.name, shape, named.defaults, architecture=config)
    trainable.check(config, where, training=False)
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    name = folder.name if folder and path.is_dir() else path.name
    shape = _shape(config, where, folder=folder, traced=traced)
    return PlanSubject(name, shape, {}, folder, config)


def _shape(
    config: Mapping[str, Any],
    where: str,
    parameters: int | None = None,
    *,
    folder: Path | None,
    traced: bool,
) -> Shape:
    """The shape of a config; where the planner has no formulas for the network, by its own class in transformers.

    Where that can't be traced, a model of the catalogue has its config's sizes.

    parameters: those of the whole checkpoint, where they are known. Raises DsrunError where neither knows it.
    """
    try:
        return shape_of(config, where, parameters, folder)
    except UnknownShapeError as unknown:
        # A config that lacks or adds something to its own family is no other network: its class would fill in what is
        # missing, and pass over what it doesn't know.
        kind = config.get("model_type")
        if not kind or kind in FAMILIES or not (traced or parameters):
            raise
        from dsrun.jobs.assembly.planning import recordings

        try:
            if traced:
                return described(recordings.described(config), str(kind))
        except DsrunError as error:
            if not parameters:
                raise DsrunError([*unknown.problems, *error.problems]) from unknown
        return stated(multimodal.text_config(config), where, int(parameters or 0))


def with_model(resolved: Resolved[PlanOptions], what: PlanSubject) -> Resolved[PlanOptions]:
    """The options with what the model's file says of fine-tuning it."""
    own = {name: value for name, value in what.defaults.items() if name in entries(PlanOptions)}
    own.pop("activation_checkpointing", None)  # it is searched
    return resolved.filled(Source.MODEL_FILE, own, model_files.file_label(what.name))


def measured(what: PlanSubject, options: PlanOptions) -> tuple[SequenceLengths, list[ExampleLength]]:
    """The lengths of --train-file's examples: their statistics, and each that can be cut.

    Raises DsrunError where there is no tokenizer, or no example.
    """
    from dsrun.data.conversations import columns_of
    from dsrun.data.data_file import check_data_file, roles_in
    from dsrun.data.hub_data import local_file
    from dsrun.data.sequence_lengths import example_lengths, measure
    from dsrun.job.job import DataSpec

    path = local_file(Path(str(options.train_file)).expanduser(), "--train-file")
    columns = columns_of(options)
    if (roles := roles_in(path, columns, options.data_format)) and roles.prompt and roles.response:
        options = replace(options, prompt_column=roles.prompt, response_column=roles.response)
        columns = columns_of(options)
    raise_all(check_data_file(path, columns, options.data_format))
    data = select(DataSpec, options, train_file=str(path), eval_file=None)
    folder = _tokenizer_folder(what, options)
    return measure(data, folder), example_lengths(data, folder)


def _tokenizer_folder(what: PlanSubject, options: PlanOptions) -> Path:
    if options.model_path:
        return options.model_path.expanduser()
    if what.folder is not None:
        return what.folder
    from dsrun.data.cache import cache_root

    for folder in sorted((cache_root() / "models").glob(f"{what.name}-*")):
        if (folder / "tokenizer.json").is_file():
            return folder
    raise DsrunError(
        f"the tokenizer of {what.name} is not on this machine",
        where="--train-file",
        hint="Name its folder with --model-path, or give the length of an example: --seq-len TOKENS",
    )
