"""The lengths of prompts and responses in training, in tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from dsrun.data.cache import model_dir
from dsrun.data.sequence_lengths import (
    MOST_CUT,
    ExampleLength,
    divided,
    example_lengths,
    fitting,
    fitting_together,
)
from dsrun.errors import DsrunError, Findings, collected
from dsrun.job.job import DataSpec, ModelSpec
from dsrun.jobs.assembly.finetune.data import Files, data_spec, with_corpus
from dsrun.jobs.assembly.finetune.stages import WithModel, layered
from dsrun.models.resolve import positions_of
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import flag_of
from dsrun.options.layers import NOTHING, Layer, Resolved, Source
from dsrun.options.table import LengthOptions

LENGTHS = ("max_source_length", "max_target_length")
FLAGS = " and ".join(flag_of(FinetuneOptions, name) for name in LENGTHS)
M = TypeVar("M", bound=WithModel)
L = TypeVar("L", bound=LengthOptions)


def settle_lengths(known: M, files: Files, findings: Findings) -> M:
    """Tokens of prompts and responses: what is asked for, else what the examples need and the model has positions for.

    Where neither of the two has a limit of its own, they share one.
    The reference recipe has its own. Where the tokenizer isn't here yet (a model that is still to be downloaded or
    made), this says so; what is cut is then looked at once more when the examples are prepared, before the start.
    """
    if findings.problems or known.options.official:
        return known
    data, _ = data_spec(known, files)
    folder = _tokenizer_folder(known.model, data)
    lengths = example_lengths(data, folder, known.model.chat_template) if folder is not None else []
    positions = positions_of(known.model)
    open_yet = Source.BUILT_IN in (known.resolved.source(name) for name in LENGTHS)
    known = layered(known, needed_limits(known.resolved, lengths, positions))
    with collected(findings.problems):
        known = layered(known, _within(known, lengths, positions))
        findings.notes.extend(_cut(known, lengths, positions, told=open_yet))
    if folder is None:
        now = _limits(known.options)
        told = "unless the model's tokenizer, once it is here, says otherwise"
        if not open_yet:
            told = "not counted yet, as the model's tokenizer isn't here: longer examples are found before the start"
        findings.notes.append(f"lengths: {now} tokens, {told}")
    return known


def needed_limits(known: Resolved[L], lengths: Sequence[ExampleLength], positions: int | None) -> Layer:
    """The limits that the examples need; where they aren't known, as much as the model has positions for.

    It is one for prompt and response together, unless one of them has a limit by whatever source: then each has its
    own.
    """
    options, why = known.options, "what 99 % of the examples need"
    if options.max_length:
        return _shared(options.max_length, lengths, "what the responses need")
    if all(known.source(name) == Source.BUILT_IN for name in LENGTHS):
        longest = fitting_together(lengths) if lengths else options.longest_example
        if positions is not None and positions < longest:
            longest, why = positions, "the model's positions"
        return _shared(longest, lengths, why if lengths or longest == positions else "until they are counted")
    if lengths:
        return Layer(Source.DERIVED, dict(zip(LENGTHS, fitting(lengths, positions), strict=True)), why)
    if positions is None:
        return NOTHING
    # Documents fill what there is.
    most = {name: min(getattr(options, name), positions // 2) for name in LENGTHS}
    return Layer(Source.DERIVED, most, "the model's positions")


def _shared(longest: int, lengths: Sequence[ExampleLength], why: str) -> Layer:
    """The layer of one limit for prompt and response, with the part of each."""
    parts = zip(LENGTHS, divided(longest, lengths), strict=True)
    return Layer.settled({"max_length": longest, **dict(parts)}, why)


def _within(known: WithModel, lengths: Sequence[ExampleLength], positions: int | None) -> Layer:
    """Lengths that the model has positions for. Raises DsrunError where they would have to be cut unasked."""
    source, target = (getattr(known.options, name) for name in LENGTHS)
    if positions is None or source + target <= positions:
        return NOTHING
    if not known.options.allow_truncation:
        fault = f"{_limits(known.options)} tokens are more than the model's {positions} positions"
        hint = "Lower them, or have them lowered: --allow-truncation."
        raise DsrunError(fault, where=_flags(known.options), hint=hint)
    if known.options.max_length:
        return _shared(positions, lengths, "the model's positions")
    target = min(target, max(positions // 2, positions - source))
    return Layer.settled(
        dict(zip(LENGTHS, (positions - target, target), strict=True)), "the model's positions"
    )


def _cut(
    known: WithModel, lengths: Sequence[ExampleLength], positions: int | None, *, told: bool
) -> list[str]:
    """A line about what the lengths cut; told: also where they cut nothing. Raises DsrunError where that is too
    much."""
    if not lengths:
        return []
    source, target = (getattr(known.options, name) for name in LENGTHS)
    together = known.options.max_length is not None
    cut = sum(length.cut(source, target, shared=together) for length in lengths)
    share, longest = cut / len(lengths), max(length.prompt + length.response for length in lengths)
    says = (
        f"{cut:,} of {len(lengths):,} examples ({share:.1%}) are longer, the longest has {longest:,} tokens"
    )
    if share > MOST_CUT and not known.options.allow_truncation:
        limits = (
            {"max_length": fitting_together(lengths)}
            if together
            else dict(zip(LENGTHS, fitting(lengths, None), strict=True))
        )
        needed = " ".join(f"{flag_of(FinetuneOptions, name)} {tokens}" for name, tokens in limits.items())
        fault = f"prompts of {source} tokens and responses of {target}: {says}"
        if together:
            fault = f"examples of {known.options.max_length} tokens: {says}"
        if positions is not None and sum(limits.values()) > positions:
            needed += f", more than the model's {positions} positions"
        hint = f"99 % need {needed}; --allow-truncation trains on what is left of them."
        raise DsrunError(fault, where=_flags(known.options), hint=hint)
    if cut or told:
        parts = f"{source} tokens of a prompt, {target} of a response"
        parts = f"{known.options.max_length} tokens of prompt and response" if together else parts
        return [f"lengths: {parts}; {says}"]
    return []


def _limits(options: FinetuneOptions) -> str:
    """The limits in tokens, as messages show them."""
    return str(options.max_length or f"{options.max_source_length} + {options.max_target_length}")


def _flags(options: FinetuneOptions) -> str:
    """The options that the limits are given by."""
    return flag_of(FinetuneOptions, "max_length") if options.max_length else FLAGS


def _tokenizer_folder(model: ModelSpec, data: DataSpec) -> Path | None:
    """A folder with the model's tokenizer; None where there is none yet, or nothing that reads one: the check of
    packages says what is missing."""
    if importlib.util.find_spec("tokenizers") is None:
        return None
    if model.source in ("folder", "chatglm"):
        folder = Path(model.location)
    elif model.source == "hub":
        return None
    else:
        folder = Path(model_dir(with_corpus(model), data))
    files = ("tokenizer.json", "tokenizer.model")
    return folder if any((folder / name).is_file() for name in files) else None
