"""Where a model comes from: a file in presets/models/, a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsrun import catalog
from dsrun.errors import DsrunError, Problem
from dsrun.files import read_json_object
from dsrun.jobs.spec.job import ModelSpec
from dsrun.models import chatglm

KIND = "presets/models"
TYPES: dict[str, tuple[type, str]] = {
    "summary": (str, "a text"),
    "parameters": (int, "a whole number, such as 6_243_584_000"),
    "repository": (str, "a text"),
    "prompt_format": (str, "a text"),
    "architecture": (dict, "a table"),
    "random": (dict, "a table"),
    "tokenizer": (dict, "a table"),
    "defaults": (dict, "a table"),
}
"""The keys of a model file and what they hold."""
WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True)
class ModelFile:
    """A model file's content."""

    name: str
    path: Path
    summary: str
    parameters: int
    """How many."""
    prompt_format: str
    architecture: dict[str, Any]
    """The transformers config."""
    repository: str | None = None
    """On the Hugging Face hub."""
    random: dict[str, Any] | None = None
    """How its weights are drawn, where there are none to download."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """How its tokenizer is trained."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Options of finetune, by name."""


def list_models(refused: list[Problem] | None = None) -> list[ModelFile]:
    """Every model that a file describes, smallest first.

    refused: receives the problems of files that can't be used; without it, the first such file raises DsrunError.
    """
    found = []
    for name in catalog.files(KIND):
        try:
            found.append(load_model_file(name))
        except DsrunError as error:
            if refused is None:
                raise
            refused += error.problems
    return sorted(found, key=lambda model: model.parameters)


def load_model_file(name: str) -> ModelFile:
    """Read presets/models/NAME.toml. Raises DsrunError for an unknown name or a bad file."""
    path = catalog.find(KIND, name, "model", "dsrun models")
    table = catalog.read_toml(path)
    for key in table:
        if key not in TYPES:
            raise DsrunError(f"unknown key {key!r}", where=str(path), hint=catalog.suggestion(key, TYPES, ""))
    missing = [key for key in ("summary", "parameters", "prompt_format", "architecture") if key not in table]
    if missing or not ("repository" in table or "random" in table):
        wanted = ", ".join(missing) or "repository (or [random])"
        raise DsrunError(f"lacks {wanted}", where=str(path))
    wrong = [
        Problem(f"{key} is {table[key]!r}", str(path), f"Expected: {words}.")
        for key, (kind, words) in TYPES.items()
        if key in table and (not isinstance(table[key], kind) or isinstance(table[key], bool))
    ]
    if wrong:
        raise DsrunError(wrong)
    return ModelFile(name, path, **table)


def file_label(name: str) -> str:
    """The model's file as --explain names it; empty where the model has none."""
    path = catalog.files(KIND).get(name)
    shipped = catalog.shipped_root()
    return "" if path is None else str(path.relative_to(shipped) if path.is_relative_to(shipped) else path)


def resolve(name: str, model_path: Path | None) -> tuple[ModelSpec, dict[str, Any]]:
    """The model that the user named, and its file's defaults.

    name: a model file's name, a Hugging Face folder or a GGUF file; model_path: where a named model's weights lie.
    Raises DsrunError if there is none, or if the folder can't be trained from.
    """
    looks_like_path = os.sep in name or name.startswith(".") or name.endswith(".gguf")
    if looks_like_path or (name not in catalog.files(KIND) and os.path.exists(name)):  # noqa: PTH110  (as above)
        if model_path is not None:
            raise DsrunError(
                f"MODEL is a path ({name}) and --model-path is given too", hint="Give the path once."
            )
        return _from_path(Path(name), Path(name).name, None, typed=name), {}
    model = load_model_file(name)
    if model_path is not None:
        return _from_path(model_path, name, model.prompt_format), model.defaults
    if model.random is not None:
        architecture = {**model.architecture, "seed": model.random.get("seed", 0)}
        spec = ModelSpec(name, "random", str(model.path), model.prompt_format, architecture, model.tokenizer)
        return spec, model.defaults
    repository = str(model.repository)  # there is one where there is no [random]: load_model_file saw to it
    _check_hub(repository)
    return ModelSpec(name, "hub", repository, model.prompt_format), model.defaults


def check_export_format(spec: ModelSpec, wanted: str) -> None:
    """Raise DsrunError where a model can't be written in that format."""
    if wanted == "chatglm" and spec.source not in ("chatglm", "hub"):
        raise DsrunError(
            f"{spec.name} is not in ChatGLM's original format, so it can't be written back in it",
            where="--export-format",
            hint="Leave the option out: RUN/model loads with transformers.",
        )


def architecture(spec: ModelSpec) -> dict[str, Any]:
    """The model's transformers config as far as it is known before anything is loaded."""
    if spec.source == "folder":
        return read_json_object(Path(spec.location) / "config.json")
    if spec.source == "hub":
        return load_model_file(spec.name).architecture
    return spec.architecture


def _from_path(path: Path, name: str, prompt_format: str | None, typed: str | None = None) -> ModelSpec:
    """typed: what the user wrote, where it may have been meant as a repository's name."""
    path = path.expanduser().absolute()
    if not os.path.exists(path):  # noqa: PTH110  (a name that is too long is no error here)
        hint = "Check the path."
        if typed and typed.count("/") == 1:
            hint = f"Is it a Hugging Face repository? Download it first: hf download {typed} --local-dir DIR"
        raise DsrunError("no such folder or file", where=str(path), hint=hint)
    if path.is_file():
        if path.suffix != ".gguf":
            raise DsrunError("is neither a folder nor a .gguf file", where=str(path))
        return ModelSpec(name, "gguf", str(path), prompt_format or "auto")
    config = _check_folder(path)
    if config["model_type"] == chatglm.MODEL_TYPE:
        chatglm.check_tokenizer(path)
        fields = chatglm.glm_fields(config, path, prompt_format)
        wanted = chatglm.prompt_format(path, prompt_format)
        return ModelSpec(name, "chatglm", str(path), wanted, fields, {"style": wanted})
    return ModelSpec(name, "folder", str(path), prompt_format or "auto")


def downloaded(spec: ModelSpec) -> ModelSpec:
    """A model from the hub as the folder that it is downloaded to, with the checks of a folder."""
    from dsrun.models.hub import download

    return _from_path(download(spec.location, spec.name), spec.name, spec.prompt_format)


def _check_folder(path: Path) -> dict[str, Any]:
    """The config of a Hugging Face model folder. Raises DsrunError unless it can be trained from."""
    config_path = path / "config.json"
    if not config_path.is_file():
        inside = sorted(entry.name for entry in path.iterdir())
        ggufs = [entry for entry in inside if entry.endswith(".gguf")]
        hint = (
            f"It holds a GGUF file; pass that: {path / ggufs[0]}"
            if ggufs
            else f"A Hugging Face model folder holds config.json, weights and a tokenizer; this one: {inside[:8]}"
        )
        raise DsrunError("holds no config.json", where=str(path), hint=hint)
    config = read_config(config_path)
    _check_weights(path)
    _check_pointers(path)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise DsrunError("holds no tokenizer", where=str(path), hint=f"One of: {', '.join(TOKENIZER_FILES)}")
    return config


def read_config(path: Path) -> dict[str, Any]:
    """A transformers config.json, or that of a folder. Raises DsrunError where it is none."""
    path = path / "config.json" if path.is_dir() else path
    config = read_json_object(path)
    if "model_type" not in config:
        raise DsrunError("has no model_type", where=str(path), hint="Is it a transformers model?")
    return config


def _check_weights(path: Path) -> None:
    for index in WEIGHT_INDEXES:
        if (path / index).is_file():
            try:
                shards = set(json.loads((path / index).read_text(encoding="utf-8"))["weight_map"].values())
                missing = sorted(shard for shard in shards if not (path / shard).is_file())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DsrunError(
                    "is not an index of weights", where=str(path / index), hint="Download it again."
                ) from error
            if missing:
                raise DsrunError(
                    f"lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:4])}",
                    where=str(path),
                    hint="The download is incomplete; run it again.",
                )
            return
    if not [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]:
        raise DsrunError("holds no weights (*.safetensors or pytorch_model*.bin)", where=str(path))


def _check_pointers(path: Path) -> None:
    """Raise DsrunError for large files of which git left only the LFS pointer, three lines of text."""
    pointers = [
        entry.name
        for pattern in ("*.safetensors", "pytorch_model*.bin", "tokenizer.model", "tokenizer.json")
        for entry in sorted(path.glob(pattern))
        if entry.is_file() and _begins_with(entry, _POINTER)
    ]
    if pointers:
        raise DsrunError(
            f"Git LFS pointers in place of the content: {', '.join(pointers[:4])}",
            where=str(path),
            hint=f"Fetch it: git -C {path} lfs pull",
        )


_POINTER = b"version https://git-lfs.github.com/spec/"


def _begins_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start


def _check_hub(repository: str) -> None:
    """Raise DsrunError where the model is not in the cache and the user's environment forbids downloading."""
    forbidding = [name for name in _OFFLINE if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}]
    if not forbidding:
        return
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    hub = Path(os.path.expandvars(named or f"{home}/hub")).expanduser()
    if not (hub / f"models--{repository.replace('/', '--')}" / "snapshots").is_dir():
        raise DsrunError(
            f"{repository} is not in the cache ({hub}) and {forbidding[0]} forbids downloading it",
            hint=f"Pass the folder that holds it with --model-path, or unset {forbidding[0]}.",
        )


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
