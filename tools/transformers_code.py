"""What dsrun reads in transformers' source, recorded of one release: for where transformers isn't installed.

    python -m tools.transformers_code [--check]     writes dsrun/models/transformers_code.json; --check compares

Recorded is what the installed transformers says of each type of model that it has a language model of.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from dsrun.models import transformers_code as source

TABLES = (
    source.CAUSAL,
    source.MASKED,
    source.ENCODER_DECODER,
    *source.MULTIMODAL,
    *source.SPEECH,
    source.ALL,
)
FLAGS = (
    source.SDPA, "_supports_flash_attn", "_supports_attention_backend", "supports_gradient_checkpointing",
)  # fmt: skip
"""The flags of classes that dsrun asks for."""


def questions() -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Everything that is asked: a function, and its words. What a config lacks is asked of models of more than text."""
    wholes = {kind for name in source.MULTIMODAL for kind in source.table(name)}
    texts = {kind for kind in map(source.text_type, sorted(wholes)) if kind}
    for name in sorted({*source.table(source.CAUSAL), *wholes, *texts}):
        if name in wholes | texts:
            for question in (source.text_type, source.config_defaults, source.config_aliases):
                yield question, (name,)
        yield source.kernel_packages, (name,)
        for flag in FLAGS:
            yield source.supports, (name, flag)
        if found := source.causal_class(name) or source.multimodal_class(name):
            yield source.required_inputs, (name, found)


def plain(value: Any) -> Any:
    """An answer as JSON has it, without defaults that are None."""
    if isinstance(value, dict):
        return {key: default for key, default in value.items() if default is not None}
    return sorted(value) if isinstance(value, frozenset) else value


def record_text() -> str:
    """The record of the installed release, an answer a line. Empty ones are left out, and flags that are set: dsrun
    asks which are not."""
    rows: dict[str, dict[str, Any]] = {}
    for question, words in questions():
        value = question(*words)
        rows.setdefault(question.__name__, {})
        if value is False or (value and value is not True):
            rows[question.__name__][" ".join(words)] = (
                [*map(plain, value)] if isinstance(value, tuple) else plain(value)
            )
    tables = {name: dict(source.table(name)) for name in TABLES}
    sections = ",\n".join(
        f" {json.dumps(part)}: {{\n" + ",\n".join(_section(*row) for row in sorted(named.items())) + "\n }"
        for part, named in (("answers", rows), ("tables", tables))
    )
    return f'{{\n "transformers": {json.dumps(metadata.version("transformers"))},\n{sections}\n}}\n'


def _section(name: str, entries: dict[str, Any]) -> str:
    lines = (
        f"   {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(entries.items())
    )
    return f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }"


def main(words: list[str]) -> int:
    """Write the record, or compare: 1 where another one would be written."""
    text = record_text()
    if "--check" not in words:
        source.RECORD.write_text(text, encoding="utf-8")
        return 0
    return int(source.RECORD.read_text(encoding="utf-8") != text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
