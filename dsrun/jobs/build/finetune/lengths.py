"""How many tokens of a prompt and of a response are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsrun.data.cache import model_dir
from dsrun.data.sequence_lengths import MOST_CUT, ExampleLength, example_lengths, fitting
from dsrun.errors import Problem
from dsrun.jobs.build.finetune.data import data_spec, with_corpus
from dsrun.jobs.build.finetune.draft import Draft
from dsrun.jobs.build.finetune.model import positions_of
from dsrun.jobs.spec.job import DataSpec, ModelSpec
from dsrun.options.commands import FinetuneOptions
from dsrun.options.table import Source, flag_of

LENGTHS = ("max_source_length", "max_target_length")


def settle_lengths(draft: Draft) -> None:
    """Tokens of prompts and responses: what is asked for, else what the examples need and the model has positions for.

    The reference recipe has its own. Where the tokenizer isn't here yet (a model that is still to be downloaded or
    made), this says so; what is cut is then looked at once more when the examples are prepared, before the start.
    """
    if draft.model is None or draft.files is None or draft.problems or draft.options.official:
        return
    folder = _tokenizer_folder(draft.model, data_spec(draft, draft.files)[0])
    lengths: list[ExampleLength] = []
    if folder is not None:
        lengths = example_lengths(data_spec(draft, draft.files)[0], folder, draft.model.chat_template)
    positions = positions_of(draft.model)
    open_yet = Source.BUILT_IN in (draft.asked.source(name) for name in LENGTHS)
    if lengths:
        fit = dict(zip(LENGTHS, fitting(lengths, positions), strict=True))
        draft.asked = draft.asked.filled(Source.DERIVED, fit, "what 99 % of the examples need")
    elif positions is not None:  # documents fill what there is
        most = {name: min(getattr(draft.options, name), positions // 2) for name in LENGTHS}
        draft.asked = draft.asked.filled(Source.DERIVED, most, "the model's positions")
    _check_lengths(draft, lengths, positions)
    if folder is None and open_yet:
        now = f"{draft.options.max_source_length} + {draft.options.max_target_length}"
        draft.notes.append(
            f"lengths: {now} tokens, unless the model's tokenizer, once it is here, says otherwise"
        )


def _check_lengths(draft: Draft, lengths: Sequence[ExampleLength], positions: int | None) -> None:
    """What the lengths cut, and whether the model has positions for them."""
    allowed = draft.options.allow_truncation
    flags = " and ".join(flag_of(FinetuneOptions, name) for name in LENGTHS)
    source, target = (getattr(draft.options, name) for name in LENGTHS)
    if positions is not None and source + target > positions:
        if not allowed:
            what = f"{source} + {target} tokens are more than the model's {positions} positions"
            hint = "Lower them, or have them lowered: --allow-truncation."
            draft.problems.append(Problem(what, flags, hint))
            return
        target = min(target, max(positions // 2, positions - source))
        source = positions - target
        draft.asked = draft.asked.settled(
            dict(zip(LENGTHS, (source, target), strict=True)), "the model's positions"
        )
    if not lengths:
        return
    cut = sum(one.cut(source, target) for one in lengths)
    share, longest = cut / len(lengths), max(one.prompt + one.response for one in lengths)
    says = (
        f"{cut:,} of {len(lengths):,} examples ({share:.1%}) are longer, the longest has {longest:,} tokens"
    )
    if share > MOST_CUT and not allowed:
        needed = " ".join(
            f"{flag_of(FinetuneOptions, name)} {tokens}"
            for name, tokens in zip(LENGTHS, fitting(lengths, None), strict=True)
        )
        what = f"prompts of {source} tokens and responses of {target}: {says}"
        hint = f"99 % need {needed}; --allow-truncation trains on what is left of them."
        draft.problems.append(Problem(what, flags, hint))
    elif draft.asked.source("max_source_length") == Source.DERIVED or cut:
        draft.notes.append(f"lengths: {source} tokens of a prompt, {target} of a response; {says}")


def _tokenizer_folder(model: ModelSpec, data: DataSpec) -> Path | None:
    """A folder with the model's tokenizer; None where there is none yet."""
    if model.source in ("folder", "chatglm"):
        folder = Path(model.location)
    elif model.source == "hub":
        return None
    else:
        folder = Path(model_dir(with_corpus(model), data))
    files = ("tokenizer.json", "tokenizer.model")
    return folder if any((folder / name).is_file() for name in files) else None
