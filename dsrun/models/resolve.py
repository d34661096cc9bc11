"""The source of a model: the catalogue, a hub's repository, a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.errors import DAMAGE, DsrunError, Problem, raise_all
from dsrun.files import explained, read_json_object
from dsrun.models import chatglm, gguf_file, hub, model_files, multimodal, trainable
from dsrun.models.adapters import CONFIG as ADAPTER_CONFIG
from dsrun.models.model_files import ModelFile
from dsrun.options.table import TEXT_FORMAT

if TYPE_CHECKING:
    from dsrun.job.job import ModelSpec

WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
MODEL_HINT = "Name a Hugging Face folder, a GGUF file, a hub's repository, or one of `dsrun models`."
READABLE_HINT = "Whose is it? Everything in a model's folder has to be readable."
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def resolve(name: str, model_path: Path | None, *, training: bool = True) -> tuple[ModelSpec, dict[str, Any]]:
    """The model that the user named, and its file's defaults.

    name: a model file's name, a hub's repository, a Hugging Face folder or a GGUF file; model_path: where a named
    model's weights lie. training: refuse what can only be asked. Of a repository no more than config.json is
    downloaded. Raises DsrunError if there is none, or if it can't be trained from.
    """
    from dsrun.job.job import ModelSpec

    model, repository = _known(name)
    if model is None and repository is None:
        if model_path is not None:
            raise DsrunError(
                f"MODEL is a path ({name}) and --model-path is given too", hint="Give the path once."
            )
        return _from_path(Path(name), _name_of(Path(name)), None, training=training), {}
    if model_path is not None:
        if model is None:
            return _from_path(model_path, name, None, training=training), {}
        return _from_path(model_path, model.name, model.prompt_format, training=training), model.defaults
    if repository and model is None:
        config = repository_config(repository)
        trainable.check(config, str(repository), training=training)
        return ModelSpec(str(repository), "hub", str(repository), "auto", config), {}
    assert model is not None  # noqa: S101  (one of the two is there)
    if model.random is not None:
        drawn = {**model.architecture, "seed": model.random.get("seed", 0)}
        spec = ModelSpec(model.name, "random", str(model.path), model.prompt_format, drawn, model.tokenizer)
        return spec, model.defaults
    # There is a repository where there is no [random]: model_files has seen to it.
    weights = hub.Repository(str(model.repository))
    hub.check_cached(weights)
    spec = ModelSpec(model.name, "hub", str(weights), model.prompt_format, model.architecture)
    return spec, model.defaults


def _known(name: str) -> tuple[ModelFile | None, hub.Repository | None]:
    """The catalogue's model of a name or a repository, or the repository; neither for a path.

    Raises DsrunError for a word that is none of them.
    """
    if model_files.find(name):
        return model_files.load_model_file(name), None
    if repository := hub.parse(name):
        plain = repository.hub == hub.HF and repository.revision is None
        return (model_files.by_repository(repository.id) if plain else None), repository
    looks_like_path = os.sep in name or name.startswith((".", "~")) or name.endswith(".gguf")
    if looks_like_path or os.path.exists(name):  # noqa: PTH110  (a name that is too long is no error here)
        return None, None
    return model_files.load_model_file(name), None  # raises, with the nearest name


def config_of(name: str) -> tuple[dict[str, Any], str, ModelFile | None]:
    """The config of a model by any of its names (a config.json, too), the file or repository that has it, and the
    catalogue's model, where it is one.

    ChatGLM's original format is as it stands. Raises DsrunError where there is none.
    """
    model, repository = _known(name)
    if model:
        return multimodal.completed(model.architecture), str(model.path), model
    if repository:
        return multimodal.completed(repository_config(repository)), str(repository), None
    path = Path(name).expanduser()
    _check_there(path, name)
    with explained("can't be read", hint=READABLE_HINT):
        if path.is_dir() and not (path / "config.json").is_file():
            raise DsrunError("holds no config.json", where=name, hint=_instead_of_a_config(path))
        return multimodal.completed(read_config(path)), str(path), None


def repository_config(repository: hub.Repository) -> dict[str, Any]:
    """A repository's config.json, downloaded where the cache lacks it. Raises as `hub.download`."""
    hub.check_cached(repository)
    return read_config(hub.config_file(repository))


def check_export_format(spec: ModelSpec, wanted: str) -> None:
    """Raise DsrunError where a model can't be written in that format."""
    if wanted == "chatglm" and spec.source not in ("chatglm", "hub"):
        raise DsrunError(
            f"{spec.name} is not in ChatGLM's original format, so it can't be written back in it",
            where="--export-format",
            hint="Leave the option out: RUN/model loads with transformers.",
        )
    if wanted == TEXT_FORMAT and (why := multimodal.no_text_model(architecture(spec))):
        raise DsrunError(
            f"{spec.name} {why}", where="--export-format", hint="Leave it out: RUN/model is the whole model."
        )


def architecture(spec: ModelSpec) -> dict[str, Any]:
    """The model's transformers config as far as it is known before anything is loaded; see `multimodal.completed`."""
    if spec.source == "folder":
        return multimodal.completed(read_json_object(Path(spec.location) / "config.json"))
    return multimodal.completed(spec.architecture)


def folder_of(spec: ModelSpec) -> Path | None:
    """The model's own folder in transformers' format; None where it has none yet."""
    return Path(spec.location) if spec.source == "folder" else None


def positions_of(spec: ModelSpec) -> int | None:
    """The longest sequence that the model was made for, in tokens; None where its config says nothing."""
    positions = multimodal.text_config(architecture(spec)).get("max_position_embeddings")
    return positions if isinstance(positions, int) and positions > 0 else None


def _name_of(path: Path) -> str:
    """The name of a model in a folder or file: that of the run's model where it is a run's result."""
    from dsrun.job.job import Job
    from dsrun.job.layout import BEST, JOB, MODEL, ORIGINAL

    whole = path.expanduser().absolute()
    if whole.name in (MODEL, BEST, ORIGINAL) and (whole.parent / JOB).is_file():
        try:
            return Path(Job.read_shown(whole.parent / JOB).model.name).name
        except (DsrunError, OSError):
            return whole.name  # a run that can't be read is no matter of its model
    return whole.name


def _from_path(path: Path, name: str, prompt_format: str | None, *, training: bool = True) -> ModelSpec:
    path = path.expanduser().absolute()
    _check_there(path, str(path))
    with explained("can't be read", hint=READABLE_HINT):
        return _of_path(path, name, prompt_format, training=training)


def _check_there(path: Path, where: str) -> None:
    """Raise DsrunError unless a folder or a file of ordinary kind is there: a pipe or a device has no end."""
    if not os.path.exists(path):  # noqa: PTH110  (a name that is too long is no error here)
        is_link = os.path.lexists(path)
        message = "is a link to what isn't there" if is_link else "no such folder or file"
        raise DsrunError(message, where=where, hint="Check where it leads." if is_link else "Check the path.")
    if not path.is_dir() and not path.is_file():
        raise DsrunError("is neither a folder nor a file of weights", where=where, hint=MODEL_HINT)


def _of_path(path: Path, name: str, prompt_format: str | None, *, training: bool) -> ModelSpec:
    from dsrun.job.job import ModelSpec

    if path.is_file():
        if path.suffix != ".gguf":
            raise DsrunError("is neither a folder nor a .gguf file", where=str(path), hint=MODEL_HINT)
        fields = gguf_file.architecture_of(path)
        return ModelSpec(name, "gguf", str(path), prompt_format or "auto", fields)
    config = _check_folder(path, training=training)
    if config["model_type"] == chatglm.MODEL_TYPE:
        chatglm.check_tokenizer(path)
        fields = chatglm.glm_fields(config, path, prompt_format)
        wanted = chatglm.prompt_format(path, prompt_format)
        return ModelSpec(name, "chatglm", str(path), wanted, fields, {"style": wanted})
    return ModelSpec(name, "folder", str(path), prompt_format or "auto")


def downloaded(spec: ModelSpec) -> ModelSpec:
    """A model from a hub as the folder that it is downloaded to, with the checks of a folder."""
    repository = hub.parse(spec.location)
    folder = hub.download(repository or hub.Repository(spec.location))
    spec_there = _from_path(folder, spec.name, None if spec.prompt_format == "auto" else spec.prompt_format)
    settings = ("chat_template", "special_tokens", "thinking", "template_args")
    return replace(spec_there, **{name: getattr(spec, name) for name in settings})


def _check_folder(path: Path, *, training: bool) -> dict[str, Any]:
    """The config of a Hugging Face model folder. Raises DsrunError unless it can be trained from."""
    config_path = path / "config.json"
    if not config_path.is_file():
        hint = _instead_of_a_config(path)
        raise DsrunError("holds no config.json", where=str(path), hint=hint)
    config = read_config(config_path)
    trainable.check(config, str(config_path), training=training)
    _check_weights(path)
    _check_pointers(path)
    _check_whole(path)
    raise_all(_text_problems(path, config))
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise DsrunError(
            "holds no tokenizer",
            where=str(path),
            hint=f"Copy it from the model that this one was made of: {', '.join(TOKENIZER_FILES)}.",
        )
    return config


def _instead_of_a_config(path: Path) -> str:
    """The hint for a folder that has no config.json."""
    inside = sorted(entry.name for entry in path.iterdir())
    if ADAPTER_CONFIG in inside:
        base = read_json_object(path / ADAPTER_CONFIG).get("base_model_name_or_path") or "MODEL"
        return f"It is an adapter; train on from it: dsrun finetune {base} --adapter {path}"
    if ggufs := [entry for entry in inside if entry.endswith(".gguf")]:
        return f"It holds a GGUF file; pass that: {path / ggufs[0]}"
    return f"A Hugging Face model folder holds config.json, weights and a tokenizer; this one: {inside[:8]}"


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


def _check_whole(path: Path) -> None:
    """Raise DsrunError for safetensors files that are shorter than their headers say."""
    problems = []
    for file in sorted(path.glob("*.safetensors")):
        size, wanted = file.stat().st_size, safetensors_bytes(file)
        if size and (wanted is None or size < wanted):
            sizes = "" if wanted is None else f": {size:,} of {wanted:,} bytes"
            problems.append(Problem(f"is cut short{sizes}", str(file), "Download it again."))
    raise_all(problems)


EMBEDDING = "embed_tokens.weight"
"""The end of the name of a text part's embedding."""


def _text_problems(path: Path, config: Mapping[str, Any]) -> list[Problem]:
    """Problems of a folder with weights of another text part than its config's, by their headers alone.

    Reading all names and shapes would need torch, and comes when the model is loaded: here the sizes are compared that
    tell one model of a family from another.
    """
    if not multimodal.way(config):
        return []
    text = multimodal.text_config(config)
    shapes = {
        name: tuple(entry["shape"])
        for file in sorted(path.glob("*.safetensors"))
        for name, entry in header_of(file)
    }
    embeddings = [name for name in shapes if name.endswith(EMBEDDING)]
    wanted = (text.get("vocab_size"), text.get("hidden_size"))
    if not embeddings or None in wanted:
        return []
    hint = "Do config.json and the weights come from one model? Download both again."
    name = next((name for name in embeddings if shapes[name] == wanted), None)
    if name is None:
        other = embeddings[0]
        fault = f"{other} has shape {list(shapes[other])}, and the text part in config.json {list(wanted)}"
        return [Problem(fault, str(path), hint)]
    layer = re.compile(re.escape(name.removesuffix(EMBEDDING)) + r"layers\.(\d+)\.")
    layers = len({match[1] for name in shapes if (match := layer.match(name))})
    if layers == text.get("num_hidden_layers"):
        return []
    fault = f"has the text weights of {layers} layers, and config.json says {text.get('num_hidden_layers')}"
    return [Problem(fault, str(path), hint)]


HEADER_BYTES = 100_000_000
"""The largest header of a safetensors file, as its own library has it."""


def safetensors_bytes(file: Path) -> int | None:
    """The length of a safetensors file by its header (8 bytes of length, JSON, tensors); None where that is cut,
    too."""
    try:
        ends = [entry["data_offsets"][1] for _, entry in header_of(file)]
    except DAMAGE:
        return None
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    return 8 + length + max(ends, default=0)


def header_of(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """The tensors of a safetensors file: name, and dtype, shape and place. Raises one of DAMAGE where it is cut."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        text = opened.read(length) if length <= min(file.stat().st_size, HEADER_BYTES) else b""
    return [(name, entry) for name, entry in json.loads(text).items() if name != "__metadata__"]


POINTER = b"version https://git-lfs.github.com/spec/"


def _check_pointers(path: Path) -> None:
    """Raise DsrunError for large files of which git left only the LFS pointer, three lines of text."""

    def begin(file: Path) -> bytes:
        with file.open("rb") as opened:
            return opened.read(len(POINTER))

    pointers = [
        entry.name
        for pattern in ("*.safetensors", "pytorch_model*.bin", "tokenizer.model", "tokenizer.json")
        for entry in sorted(path.glob(pattern))
        if entry.is_file() and begin(entry) == POINTER
    ]
    if pointers:
        raise DsrunError(
            f"Git LFS pointers in place of the content: {', '.join(pointers[:4])}",
            where=str(path),
            hint=f"Fetch it: git -C {path} lfs pull",
        )
