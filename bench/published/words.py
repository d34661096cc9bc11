"""The language of a file of cases: its fields, the words that they take, and what a word that isn't one of them does.

A row with such a word has no prediction, for a guess at what it means would be scored as if the source had said it:
reading.read raises UnknownWordError with the field and the word. null is as good as an absent field. README.md beside
this file says what the fields mean. Words are added, none is taken away.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import date
from difflib import get_close_matches
from functools import cache
from typing import Any

from dsrun import catalog
from dsrun.planner import gpus

TEXTS = (
    "id", "source", "published_as", "model", "catalogue", "notes", "hold", "outside", "host_kind", "host_metric",
    "assumed",
)  # fmt: skip
"""Fields with a text, or a list of texts, that no prediction depends on but through what shapes.find knows."""
SWITCHES = (
    "flash_attn", "variable_lengths", "padded", "lora", "train_emb", "fused_adam", "overlap", "auto_bucket",
    "zero_init", "fits", "opt_before_states", "host_only", "expandable", "kbit_casts", "flat_parameters",
    "attention_dropout", "fp32_stream",
)  # fmt: skip
NUMBERS = (
    "params", "layers", "gpus", "nodes", "ep", "tp", "gpu_mem_gib", "seq_len", "micro_batch", "ga", "lora_r",
    "lora_dropout", "reduce_bucket", "sub_group", "measured_gpu_gib", "smi_gib", "s_it", "samples_s", "tok_s_gpu",
    "host_ram_gib", "steady_gib", "mfu", "hours", "oom_alloc_gib", "oom_tried_gib", "oom_unused_gib", "retained_logits",
)  # fmt: skip
WORDS = (
    "strategy", "offload", "precision", "optimizer", "quant", "logits", "metric", "grad_ckpt", "lora_targets",
    "gpu_kind", "trainer", "spec", "added",
)  # fmt: skip
"""Fields that reading looks up in a table of its own."""
FIELDS = (*TEXTS, *SWITCHES, *NUMBERS, *WORDS)
SPECS = ("full", "partial")
METRICS = ("allocated", "reserved", "smi")
TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0")
CLOSE = 0.85
"""Likeness from which on an unknown field is a known one that was misspelt."""


class UnreadableError(Exception):
    """A case that the planner has nothing to say to; the text says why."""


class UnknownWordError(UnreadableError):
    """A word that is not in the language."""

    def __init__(self, field: str, word: object, why: str = "is not one that the planner knows") -> None:
        super().__init__(f"{field} {word!r} {why}")
        self.field = field
        self.word = str(word)


def check(case: Mapping[str, Any], notes: list[str]) -> None:
    """Raise UnknownWordError for a field that is misspelt, a number that is none, a switch that is neither on nor off.

    A field that nothing here is like is left unread, with a note.
    """
    for field in case.keys() - set(FIELDS):
        meant = get_close_matches(field, [name for name in FIELDS if case.get(name) is None], 1, CLOSE)
        if meant:
            raise UnknownWordError("field", field, f"is not one of a case; {meant[0]} is")
        notes.append(f"field {field} is not one of a case: not read")
    for field in SWITCHES:
        switch(case, field)
    for field in NUMBERS:
        number(case, field)
    _one_of(case, "spec", SPECS)
    _one_of(case, "metric", METRICS)
    if case.get("gpu_kind") and not cards_named(str(case["gpu_kind"]).lower(), cards().values()):
        raise UnknownWordError("gpu_kind", case["gpu_kind"], "names no card of presets/gpus")
    if case.get("added") is not None:
        _day(case["added"])


def _one_of(case: Mapping[str, Any], field: str, known: Collection[str]) -> None:
    if case.get(field) is not None and case[field] not in known:
        raise UnknownWordError(field, case[field], f"is not one of {', '.join(known)}")


def _day(value: object) -> None:
    try:
        date.fromisoformat(str(value))
    except ValueError:
        raise UnknownWordError("added", value, "is not a day as 2026-11-24") from None


def switch(case: Mapping[str, Any], field: str) -> bool | None:
    """Whether a switch is on; None where the case doesn't say. Raises UnknownWordError."""
    value = case.get(field)
    if value is None or isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in (*TRUE, *FALSE):
        raise UnknownWordError(field, value, "is neither true nor false")
    return text in TRUE


def number(case: Mapping[str, Any], field: str) -> float | None:
    """A number; None where the case doesn't give it. Raises UnknownWordError."""
    value = case.get(field)
    if value is None:
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise UnknownWordError(field, value, "is not a number") from None
    if isinstance(value, bool) or not 0 <= found < float("inf"):
        raise UnknownWordError(field, value, "is not a number of 0 or more")
    return found


# --- cards ----------------------------------------------------------------------------------------------------------


@cache
def cards() -> dict[str, gpus.GpuModel]:
    """The kinds of GPU that dsrun ships."""
    return {name: gpus.load(name) for name in catalog.files(gpus.KIND)}


def card(case: Mapping[str, Any]) -> gpus.GpuModel | None:
    """The kind of GPU that the case's source names, among those with its memory; without a name an A100, or the card
    that has the least of that size."""
    said = float(case.get("gpu_mem_gib") or 0)
    same = [one for one in cards().values() if said in (one.memory_gb, one.memory_gib)]
    texts = [str(case.get(field) or "").lower() for field in ("gpu_kind", "source", "id")]
    named = next((found for text in texts if (found := cards_named(text, same or cards().values()))), [])
    usual = [one for one in same if one.name.startswith("a100")]
    return min(
        named or usual or same, key=lambda one: (one.memory_gib, one.name.endswith("pcie")), default=None
    )


def cards_named(text: str, kinds: Collection[gpus.GpuModel]) -> list[gpus.GpuModel]:
    """The kinds whose name stands there as a word of its own, "8xA800" among them: a T4 is not in "swift4"."""
    return [one for one in kinds if re.search(rf"(?<![a-wyz0-9]){_short(one.name)}(?![a-z0-9])", text)]


def _short(name: str) -> str:
    """4090 of rtx-4090, a100 of a100-80g-pcie, both words of titan-rtx-24g: what people call a card, as a pattern."""
    if name.startswith("titan-"):
        return "[ -]".join(name.split("-")[:2])
    return name.removeprefix("rtx-").removeprefix("quadro-rtx-").split("-")[0]
