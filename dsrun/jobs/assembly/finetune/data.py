"""The files of a fine-tune, and their first examples."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from dsrun import catalog
from dsrun.data import chosen_rows
from dsrun.data.conversations import PROMPT_RESPONSE, TEXT, named_format, unread_columns
from dsrun.data.data_file import bad_rows, check_data_file, roles_in, unusable
from dsrun.data.hub_data import local_file
from dsrun.data.rows import first_rows, format_of, keys_of, weighted_file
from dsrun.errors import DsrunError, Findings, Problem
from dsrun.job.job import DataSpec, ModelSpec
from dsrun.jobs.assembly.finetune.stages import Requested, WithModel, layered
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import select
from dsrun.options.layers import NOTHING, Layer, Resolved, Source

DATASETS = "presets/datasets"
R = TypeVar("R", bound=Requested)


class Files(NamedTuple):
    """Files of examples."""

    train: tuple[Path, ...]
    evaluation: Path | None
    weights: tuple[float, ...] = ()
    """Weight of each training file: how often its examples are in an epoch."""
    named: tuple[Path, ...] = ()
    """The user's own files, where `train` and `evaluation` are rows chosen of them; messages are about these."""

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file."""
        return self.train if self.evaluation is None else (*self.train, self.evaluation)

    @property
    def judged(self) -> tuple[Path, ...]:
        """The files that are looked at, under the names that the user knows."""
        return self.named or self.all


def check_data(requested: R, findings: Findings) -> tuple[R, Files] | None:
    """The files and their first examples, and the options with the columns that these show; without a model's name
    nobody knows what ships with it.

    Raises DsrunError where there are none.
    """
    options = requested.options
    if findings.problems and not options.train_file:
        return None
    files = data_files(options, requested.dataset if isinstance(requested, WithModel) else None)
    layer = by_columns(requested, files)
    if layer.note:
        findings.notes.append(layer.note)
    requested = layered(requested, layer)
    columns, data_format = requested.columns, asked_format(requested.resolved)
    problems = [problem for path in files.judged for problem in check_data_file(path, columns, data_format)]
    if options.strict_data and not problems:
        problems = [problem for path in files.judged for problem in unusable(path, columns, data_format)]
    if not problems:
        problems = _bad_rows(requested, files, findings)
    findings.problems.extend(problems)
    if options.official and not problems:
        findings.problems.extend(
            Problem("has prompts and responses, no plain text", "--official", f"Leave it out, or {path}.")
            for path in files.judged
            if format_of(path, columns, data_format) == TEXT
        )
    return requested, files


def by_columns(requested: Requested, files: Files) -> Layer:
    """The columns of prompts and responses, by their names, where nobody names any and no format is known by its own.

    Raises DsrunError for files that have them under different names.
    """
    named = ("prompt_column", "response_column", "text_column")
    if requested.options.official or any(requested.resolved.source(name) > Source.DERIVED for name in named):
        return NOTHING
    columns, data_format = requested.columns, requested.options.data_format
    known = {path: roles for path in files.judged if (roles := roles_in(path, columns, data_format))}
    if not known:
        return NOTHING
    if len(set(known.values())) > 1:
        pairs = "; ".join(f"{path}: {roles.prompt}, {roles.response}" for path, roles in known.items())
        hint = "Rename them, so that --prompt-column and --response-column hold for every file."
        raise DsrunError(f"the files have prompts and responses under different names: {pairs}", hint=hint)
    path, roles = next(iter(known.items()))
    kind = "a classifier: " if roles.is_class else ""
    note = (
        f"{path}: {kind}prompts are column {roles.prompt!r}, responses {roles.response!r} (--prompt-column, "
        f"--response-column choose others; --text-column NAME trains on a text alone)"
    )
    chosen = {"prompt_column": roles.prompt, "response_column": roles.response}
    return Layer.settled(chosen, f"the columns of {path.name}", note)


def _bad_rows(requested: Requested, files: Files, findings: Findings) -> list[Problem]:
    """Problems of files of which many rows can't be trained on; of a few a note says so."""
    problems: list[Problem] = []
    for path in (
        () if requested.options.official else files.judged
    ):  # ChatGLM's own script leaves them out, too
        found = bad_rows(path, requested.columns, asked_format(requested.resolved))
        if found.too_many and not requested.options.allow_bad_rows:
            hint = "Fix them (--strict-data names the first), or train on the others: --allow-bad-rows."
            problems.append(Problem(found.words, str(path), hint))
        elif found.bad:
            findings.notes.append(f"{path}: {found.words}")
    return problems


def data_files(options: FinetuneOptions, dataset: str | None) -> Files:
    """The files to train on and to evaluate with: those that are named, less the rows that nobody asked for.

    Raises DsrunError where there are none, or too few rows.
    """
    files = _named_files(options, dataset)
    if options.val_size is not None and options.eval_file is not None:
        raise DsrunError(
            "and --eval-file both say what is held out", where="--val-size", hint="Give one of them."
        )
    if not all(map(os.path.isfile, files.train)):
        return files  # the check of each file says what is wrong with it
    trained, held_out = chosen_rows.chosen(
        files.train, val_size=options.val_size, max_samples=options.max_samples, seed=options.seed
    )
    named = files.train if held_out else files.all
    return Files(
        trained, held_out or files.evaluation, files.weights, () if trained == files.train else named
    )


def _named_files(options: FinetuneOptions, dataset: str | None) -> Files:
    """The training and evaluation files; the model's own data set where the user names no file."""
    evaluation = local_file(options.eval_file, "--eval-file") if options.eval_file else None
    if options.train_file:
        weighted = [weighted_file(text) for text in options.train_file]
        if any(weight == 0 for _, weight in weighted):
            hint = "FILE:2 takes each example twice."
            raise DsrunError("a weight has to be more than 0", where="--train-file", hint=hint)
        weights = tuple(weight for _, weight in weighted)
        plain = all(weight == 1 for weight in weights)
        files = tuple(local_file(path, "--train-file") for path, _ in weighted)
        return Files(files, evaluation, () if plain else weights)
    if dataset is None:
        raise DsrunError(
            "this model ships without data",
            hint="Name a file: --train-file data.jsonl (JSONL, JSON, CSV or Parquet)",
        )
    folder = dataset_folder(dataset)
    return Files((folder / "train.jsonl",), evaluation or folder / "dev.jsonl")


def dataset_folder(name: str) -> Path:
    """The folder of a shipped data set, presets/datasets/NAME."""
    for folder in catalog.folders(DATASETS):
        if (folder / name / "train.jsonl").is_file():
            return folder / name
    raise DsrunError(f"there is no data set {name!r} in {DATASETS}", hint="Is the installation complete?")


def asked_format(resolved: Resolved[FinetuneOptions]) -> str:
    """The format that the user names, by name or by naming its columns; else AUTO."""
    return named_format(resolved.options.data_format, resolved.user)


def data_spec(requested: Requested, files: Files) -> tuple[DataSpec, list[str]]:
    """The data, and a line for each file whose format was found out and is not the plainest."""
    data_format = asked_format(requested.resolved)
    formats = [format_of(path, requested.columns, data_format) for path in files.all]
    judged = {path: format_of(path, requested.columns, data_format) for path in files.judged}
    notes = [
        f"{path} is read as {kind} (--data-format decides otherwise)"
        for path, kind in judged.items()
        if kind not in (data_format, PROMPT_RESPONSE)
    ]
    for path, kind in judged.items():
        if unread := unread_columns(keys_of(first_rows(path)), kind, requested.columns):
            notes.append(f"columns that are not read: {', '.join(unread)} ({path})")
    if files.evaluation and any(
        os.path.realpath(path) == os.path.realpath(files.evaluation) for path in files.train
    ):
        notes.append(
            f"{files.evaluation} is trained on, too: its loss and scores say nothing of other texts (--val-size)"
        )
    first, *more = map(str, files.train)
    spec = select(
        DataSpec,
        requested.options,
        train_file=first,
        eval_file=str(files.evaluation) if files.evaluation else None,
        more_files=tuple(more),
        weights=files.weights,
        data_format=formats[0] if len(set(formats)) == 1 else data_format,
    )
    return spec, notes


def with_corpus(model: ModelSpec) -> ModelSpec:
    """A model that is made here learns its tokenizer from a shipped data set: the name becomes a folder."""
    if model.source != "random":
        return model
    corpus = str(dataset_folder(model.tokenizer["dataset"]))
    return replace(model, tokenizer={**model.tokenizer, "corpus": corpus})
