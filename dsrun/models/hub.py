"""Models of the Hugging Face Hub and of ModelScope: their names, their config.json, and the download into the cache.

HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN are the library's own settings, and honoured by it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError

FILES = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*_chatglm.py"]
"""Files that are downloaded: config, weights, tokenizer. ChatGLM's code is read for a constant, never run."""
BIN_FILES = ["pytorch_model*.bin"]
IGNORED_FILES = ["*/*", "consolidated*"]
"""The same weights in another form: Llama's original/, onnx/, Mistral's consolidated.safetensors."""
HF, MODELSCOPE = "hf:", "modelscope:"
"""Prefixes of a repository's id that name its hub; without one, the Hugging Face Hub is meant."""
ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class Repository:
    """A repository of a hub. revision: a branch, a tag or a commit; None for the newest."""

    id: str
    hub: str = HF
    revision: str | None = None

    def __str__(self) -> str:
        """The repository as a user may write it."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{'' if self.hub == HF else self.hub}{self.id}{revision}"


def parse(text: str) -> Repository | None:
    """The repository that a text names: `OWNER/NAME`, with hf: or modelscope: before it and @REVISION behind.

    None where it names none. A file or folder of the name is nearer than a repository, unless a hub is named.
    """
    hub = next((prefix for prefix in (HF, MODELSCOPE) if text.startswith(prefix)), None)
    name = text.removeprefix(hub or "")
    if not ID.fullmatch(name) or (hub is None and os.path.lexists(text)):
        if hub:
            raise DsrunError(f"{text!r} names no repository", hint=f"As in {hub}Qwen/Qwen3-4B.")
        return None
    repository, _, revision = name.partition("@")
    return Repository(repository, hub or HF, revision or None)


def config_file(repository: Repository) -> Path:
    """The repository's config.json in the cache, downloaded where it isn't there. Raises as `download`."""
    with _explained(repository):
        if repository.hub == MODELSCOPE:
            return Path(
                _modelscope().model_file_download(repository.id, "config.json", **_revision(repository))
            )
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(repository.id, "config.json", **_revision(repository)))


def download(repository: Repository) -> Path:
    """The local folder of a repository, downloaded where it is not in the cache yet (it shows its own progress).

    Raises DsrunError where it is gated, missing or out of reach, or holds no weights, with what to do.
    """
    with _explained(repository):
        # Many repositories hold the weights in both forms: asking for both would double the download.
        folder = _snapshot(repository, FILES)
        if not any(folder.glob("*.safetensors")):
            folder = _snapshot(repository, FILES + BIN_FILES)
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", *BIN_FILES)):
        message = "holds no weights that transformers reads (*.safetensors or pytorch_model*.bin)"
        hint = "Does it hold GGUF files? Download one and pass its path."
        if set_offline := offline():
            message, hint = "is in the cache without its weights", f"Unset {set_offline} to download them."
        raise DsrunError(message, where=str(repository), hint=hint)
    return folder


def offline() -> str:
    """The variable of the user's environment that forbids downloading; empty where none does."""
    return next(
        (name for name in OFFLINE if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}), ""
    )


def check_cached(repository: Repository) -> None:
    """Raise DsrunError where the model is not in the cache and the user's environment forbids downloading."""
    forbidding = offline()
    if not forbidding or repository.hub != HF:
        return
    cache = cache_folder()
    if not (cache / f"models--{repository.id.replace('/', '--')}" / "snapshots").is_dir():
        raise DsrunError(
            f"{repository} is not in the cache ({cache}) and {forbidding} forbids downloading it",
            hint=f"Pass the folder that holds it with --model-path, or unset {forbidding}.",
        )


def cache_folder() -> Path:
    """The cache folder of the Hugging Face library, which takes a second to import, and is not."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(named or f"{home}/hub")).expanduser()


def _revision(repository: Repository) -> dict[str, Any]:
    return {"revision": repository.revision} if repository.revision else {}


def _snapshot(repository: Repository, patterns: list[str]) -> Path:
    library = _modelscope() if repository.hub == MODELSCOPE else importlib.import_module("huggingface_hub")
    options = {"allow_patterns": patterns, "ignore_patterns": IGNORED_FILES, **_revision(repository)}
    return Path(library.snapshot_download(repository.id, **options))


def _modelscope() -> Any:
    """The package, which is imported here alone. Raises DsrunError where it is not installed."""
    if importlib.util.find_spec("modelscope") is None:
        hint = "Install it: pip install modelscope. Or take the same model from the Hugging Face Hub."
        raise DsrunError("models of ModelScope need its package, modelscope", hint=hint)
    return importlib.import_module("modelscope")


@contextmanager
def _explained(repository: Repository) -> Iterator[None]:
    """The libraries' errors as DsrunErrors with the next step."""
    from huggingface_hub import errors

    otherwise = "Or download it elsewhere and pass the folder that holds it."
    try:
        yield
    except errors.GatedRepoError as error:
        page = f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/{repository.id}"
        hint = f"Accept its licence on {page}, then `hf auth login` (or set HF_TOKEN). {otherwise}"
        raise DsrunError(f"{repository} is gated", hint=hint) from error
    except errors.RevisionNotFoundError as error:
        hint = "A branch, a tag or a whole commit of it; without @..., the newest."
        raise DsrunError(f"{repository.id} has no revision {repository.revision!r}", hint=hint) from error
    except errors.RepositoryNotFoundError as error:
        hint = f"Check the name; a private one takes `hf auth login`. {otherwise}"
        raise DsrunError(f"there is no repository {repository} (or it is private)", hint=hint) from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(repository, first_line(error), otherwise) from error
    except errors.EntryNotFoundError as error:
        hint = "Is it a transformers model? From a GGUF repository download one file and pass its path."
        raise DsrunError(f"{repository} holds no config.json", hint=hint) from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        raise _unreachable(repository, first_line(error), otherwise) from error


def _unreachable(repository: Repository, reason: str, otherwise: str) -> DsrunError:
    mirror = os.environ.get("HF_ENDPOINT")
    hint = (
        f"Does HF_ENDPOINT answer: {mirror}?" if mirror else "Behind a firewall, set HF_ENDPOINT to a mirror."
    )
    if forbidding := offline():
        reason, hint = f"{forbidding} forbids it and the cache doesn't hold it", f"Unset {forbidding}."
    return DsrunError(f"{repository} can't be downloaded: {reason}", hint=f"{hint} {otherwise}")


def first_line(error: Exception) -> str:
    """The first line of a library's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
