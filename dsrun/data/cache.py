"""The cache of prepared models and tokenised data, under names made of their content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from dsrun import __version__
from dsrun.data.inputs import CONFIG, EVAL, OF_MODEL, TOKENIZER, TRAIN, WEIGHTS, needed, read_all, read_inputs
from dsrun.data.rows import ending
from dsrun.errors import DsrunError, Problem
from dsrun.files import why_not_writable
from dsrun.host.system import nearest_there
from dsrun.job.job import DataSpec, InputFile, Inputs, Job, ModelSpec, Prepared

WORDS = {"model_dir": "the model folder", "train_rows": "the training rows", "eval_rows": "the held-out rows"}
"""The fields of Prepared that are in the cache, and how messages call them."""
RECIPE = 6
"""Raise it when dsrun prepares the same input differently: old entries are then no longer found."""


def cache_root() -> Path:
    """$DSRUN_CACHE, else dsrun/ in $XDG_CACHE_HOME or ~/.cache."""
    if os.environ.get("DSRUN_CACHE"):
        return Path(os.environ["DSRUN_CACHE"]).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "dsrun"


def check_cache() -> list[Problem]:
    """The problem that keeps anything from being written to the cache; empty where nothing does."""
    root = cache_root()
    if why := why_not_writable(nearest_there(root)):
        hint = "Name another folder: DSRUN_CACHE=/path"
        return [Problem(f"the cache can't be written: {why}", str(root), hint)]
    return []


def prepared_paths(model: ModelSpec, data: DataSpec, adapter: str | None = None) -> Prepared:
    """The places of the model folder and the tokenised examples. Reads the files' content, writes nothing.

    adapter: the folder or file of an adapter that training begins with. Raises DsrunError for a file that is gone or
    can't be read.
    """
    return named(model, data, read_all(model, data, adapter))


def model_dir(model: ModelSpec, data: DataSpec) -> str:
    """The place of the model folder alone; no data are read. Raises DsrunError for a file that can't be read."""
    return named(model, data, read_inputs(model, data, kinds=OF_MODEL)).model_dir


def named(model: ModelSpec, data: DataSpec, inputs: Inputs) -> Prepared:
    """The places for files that were read before, on any host: their names are made of the files' digests."""
    root = cache_root()
    model_key = _model_key(model, inputs)
    folder = (
        Path(model.location)
        if model.source == "folder" and not model.special_tokens
        else root / "models" / f"{_safe(model.name)}-{model_key}"
    )
    options = [
        RECIPE, model_key, model.prompt_format, data.prompt_column, data.response_column, data.history_column,
        data.text_column, data.data_format, data.max_source_length, data.max_target_length, data.train_on_prompt,
        data.official,
        data.strict_data,  # without it, rows may have been left out
        *filter(None, [model.chat_template, data.max_length and f"together {data.max_length}"]),
        *([model.thinking, json.dumps(model.template_args, sort_keys=True)] if model.tells_template else []),
    ]  # fmt: skip

    def rows(files: Iterable[InputFile], weights: Sequence[float] = ()) -> str:
        digests = [f"{ending(Path(file.path))} {file.digest}" for file in files]
        name = _digest(*map(str, options), *digests, *map(str, weights))
        return str(root / "rows" / f"{name}.arrow")

    return Prepared(
        str(folder),
        rows(inputs.of(TRAIN), data.weights),
        rows(inputs.of(EVAL)) if data.eval_file else None,
        inputs,
    )


def places(prepared: Prepared) -> list[tuple[str, str]]:
    """The paths in the cache that a job has, each with its field of Prepared."""
    return [(field, path) for field in WORDS if (path := getattr(prepared, field))]


def check_name(job: Job, field: str, made_of: Inputs) -> None:
    """Raise DsrunError where this dsrun names an entry of the cache otherwise than the job does.

    field: the entry, as a field of Prepared. made_of: the files that were read.
    """
    planned = getattr(job.prepared, field)
    if Path(planned).name == Path(getattr(named(job.model, job.data, made_of), field)).name:
        return
    reasons = f"dsrun {job.dsrun_version} planned it, and {__version__} may prepare in another way"
    if job.prepared.inputs is None:
        reasons = f"its data, its tokenizer or its model was changed, or {reasons}"
    files = ", ".join(job.data.train_files if field == "train_rows" else needed(job.model, job.data))
    raise DsrunError(
        f"what the run was planned with ({WORDS[field]}) can't be made again: {reasons}",
        where=files or job.model.location,
        hint=f"Put back what was changed, or start a new run: dsrun finetune. In the cache it was {planned}",
    )


def _model_key(model: ModelSpec, inputs: Inputs) -> str:
    """A digest of what decides the tokenizer and, for models that dsrun makes, the weights."""
    parts = [str(RECIPE), model.source]
    tokenizer = [file.digest for file in inputs.of(TOKENIZER)]
    weights = inputs.of(WEIGHTS)
    by_time = [f"{file.path} {file.size} {file.mtime_ns}" for file in weights]
    if model.source == "random":
        parts += [json.dumps([model.architecture, model.tokenizer], sort_keys=True), *tokenizer]
    elif model.source == "gguf":
        # A line each, unlike by_time: another form would lose every entry that caches have.
        parts += [part for file in weights for part in (file.path, str(file.size), str(file.mtime_ns))]
    elif model.source == "chatglm":
        parts += [json.dumps([model.architecture, model.tokenizer], sort_keys=True), *tokenizer, *by_time]
    elif model.source == "folder":
        parts += tokenizer
        if model.special_tokens:
            parts += [*(file.digest for file in inputs.of(CONFIG)), *by_time]
    else:
        parts += [model.location]
    if model.special_tokens:  # of which the template frames with some (training/models/new_tokens.py)
        parts += [*model.special_tokens, model.prompt_format, model.chat_template]
    return _digest(*parts)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _safe(name: str) -> str:
    """The name as a file name: letters, digits, dots and dashes stay."""
    return "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in name)
