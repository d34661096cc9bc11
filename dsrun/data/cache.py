"""The cache of prepared models and tokenised data, under names made of their content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from dsrun.errors import Problem
from dsrun.files import nearest_there, why_not_writable
from dsrun.jobs.spec.job import DataSpec, ModelSpec, Prepared

RECIPE = 6
"""Raise it when dsrun prepares the same input differently: old entries are then no longer found."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def cache_root() -> Path:
    """$DSRUN_CACHE, else dsrun/ in $XDG_CACHE_HOME or ~/.cache."""
    if os.environ.get("DSRUN_CACHE"):
        return Path(os.environ["DSRUN_CACHE"]).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "dsrun"


def check_cache() -> list[Problem]:
    """Why nothing can be kept in the cache; empty if it can."""
    root = cache_root()
    if why := why_not_writable(nearest_there(root)):
        hint = "Name another folder: DSRUN_CACHE=/path"
        return [Problem(f"the cache can't be written: {why}", str(root), hint)]
    return []


def prepared_paths(model: ModelSpec, data: DataSpec) -> Prepared:
    """Where the model folder and the tokenised examples belong. Reads the files' content, writes nothing."""
    root = cache_root()
    model_key = _model_key(model)
    model_dir = (
        Path(model.location)
        if model.source == "folder" and not model.special_tokens
        else root / "models" / f"{_safe(model.name)}-{model_key}"
    )
    options = [
        RECIPE, model_key, model.prompt_format, data.prompt_column, data.response_column, data.history_column,
        data.text_column, data.data_format, data.max_source_length, data.max_target_length, data.train_on_prompt,
        data.official,
        data.strict_data,  # without it, rows may have been left out
        *filter(None, [model.chat_template]),
        *([model.thinking, json.dumps(model.template_args, sort_keys=True)] if model.tells_template else []),
    ]  # fmt: skip

    def rows(paths: Sequence[str], weights: Sequence[float] = ()) -> str:
        digests = [f"{Path(path).suffix.lower()} {_file_digest(Path(path))}" for path in paths]
        found = _digest(*map(str, options), *digests, *map(str, weights))
        return str(root / "rows" / f"{found}.arrow")

    return Prepared(
        str(model_dir),
        rows(data.train_files, data.weights),
        rows([data.eval_file]) if data.eval_file else None,
    )


def _model_key(model: ModelSpec) -> str:
    """A digest of what decides the tokenizer and, for models that dsrun makes, the weights."""
    location = Path(model.location)
    parts = [str(RECIPE), model.source]
    if model.source == "random":
        parts += [json.dumps([model.architecture, model.tokenizer], sort_keys=True)]
        parts += [_file_digest(path) for path in sorted(Path(model.tokenizer["corpus"]).glob("*.jsonl"))]
    elif model.source == "gguf":
        stat = location.stat()
        parts += [str(location), str(stat.st_size), str(stat.st_mtime_ns)]
    elif model.source == "chatglm":
        parts += [
            json.dumps([model.architecture, model.tokenizer], sort_keys=True),
            _file_digest(location / "tokenizer.model"),
        ]
        parts += _weights_key(location)
    elif model.source == "folder":
        parts += [_file_digest(location / name) for name in TOKENIZER_FILES if (location / name).is_file()]
        if model.special_tokens:
            parts += [_file_digest(location / "config.json"), *_weights_key(location)]
    else:
        parts += [model.location]
    if model.special_tokens:  # of which the template frames with some (training/models/new_tokens.py)
        parts += [*model.special_tokens, model.prompt_format, model.chat_template]
    return _digest(*parts)


def _weights_key(folder: Path) -> list[str]:
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    return [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in sorted(weights)]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        found = hashlib.sha256()
        while block := file.read(1 << 20):
            found.update(block)
        return found.hexdigest()


def _safe(name: str) -> str:
    """The name as a file name: letters, digits, dots and dashes stay."""
    return "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in name)
