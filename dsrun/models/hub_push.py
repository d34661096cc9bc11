"""A model's folder to the Hugging Face Hub: one commit, so that nobody ever downloads half of it.

The token is the library's own affair (HF_TOKEN, or what `hf auth login` has kept): it is never on a command line, and
in no message. huggingface_hub's own upload_folder makes several commits of a large folder; create_commit uploads first,
and what it has uploaded is nowhere to be seen until the commit.
"""

from __future__ import annotations

import fnmatch
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError, Problem
from dsrun.models import hub

OPTION, PUBLIC = "--push", "--public"
FILE_BYTES = 50 * 10**9
"""The largest file that the Hub takes (its documentation, "Repository limitations and recommendations")."""
REPLACED = ("*.safetensors", "pytorch_model*.bin", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""Files of another model in a repository that would be read together with the new one, and are removed with it."""


@dataclass(frozen=True)
class PushTarget:
    """The goal of a push, as it was when it was looked at."""

    repository: str
    public: bool
    head: str | None
    """The newest commit; None where the repository is still to be made."""
    stale: tuple[str, ...] = ()
    """Files there that are another model's, if the new one doesn't replace them."""


def target(name: str, *, public: bool) -> PushTarget:
    """Ask the Hub about a repository. Raises DsrunError where nothing can be pushed there, before anything is written.

    public: whether everybody may see it. What is there already keeps who may see it, and has to agree.
    """
    named = name.removeprefix(hub.HF)
    repository = hub.parse(f"{hub.HF}{named}") if hub.ID.fullmatch(named) else None
    if repository is None or repository.revision:
        message = f"{name!r} names no repository to push to"
        raise DsrunError(message, where=OPTION, hint="As in OWNER/NAME, without a revision.")
    if forbidding := hub.offline():
        raise DsrunError(f"{forbidding} forbids it", where=OPTION, hint=f"Unset {forbidding}.")
    api, library = _api(), importlib.import_module("huggingface_hub")
    with _explained(repository.id):
        if library.get_token() is None:
            hint = "Log in: `hf auth login`, or set HF_TOKEN; the token needs the right to write."
            raise DsrunError("there is no token for the Hub", where=OPTION, hint=hint)
        try:
            info = api.model_info(repository.id)
        except library.errors.RepositoryNotFoundError:
            return PushTarget(repository.id, public, None)
    if info.private == public:
        visibility, hint = ("private", f"Leave {PUBLIC} out, or change that on its page.")
        if not info.private:
            visibility, hint = (
                "public",
                f"Say {PUBLIC} if everybody may see this model, or name another repository.",
            )
        raise DsrunError(f"{repository.id} is there already, and {visibility}", where=OPTION, hint=hint)
    there = [pattern.rfilename for pattern in info.siblings or []]
    stale = tuple(
        name
        for name in there
        if any(fnmatch.fnmatch(name, pattern) for pattern in REPLACED) and "/" not in name
    )
    return PushTarget(repository.id, public, info.sha, stale)


def too_large(folder: Path) -> list[Problem]:
    """The files of a folder that the Hub wouldn't take."""
    hint = f"Write it anew, in smaller files: dsrun export RUN --checkpoint N -o DIR {OPTION} REPO"
    return [
        Problem(f"has {size / 1e9:.0f} GB, and the Hub takes {FILE_BYTES / 1e9:.0f}", str(path), hint)
        for path in _files(folder)
        if (size := path.stat().st_size) > FILE_BYTES
    ]


def push(folder: Path, to: PushTarget, message: str) -> str:
    """Upload a folder's files in one commit; returns its address. Makes the repository where there is none.

    Raises DsrunError where the Hub refuses, or where somebody changed the repository since it was looked at.
    """
    library, api = importlib.import_module("huggingface_hub"), _api()
    files = _files(folder)
    names = {path.name for path in files}
    operations: list[Any] = [library.CommitOperationAdd(path.name, path) for path in files]
    operations += [library.CommitOperationDelete(name) for name in to.stale if name not in names]
    with _explained(to.repository):
        if to.head is None:
            api.create_repo(to.repository, private=not to.public, exist_ok=False)
        # parent_commit makes the Hub refuse (412) where somebody pushed since we looked: the files that are removed
        # here might be theirs.
        done = api.create_commit(to.repository, operations, commit_message=message, parent_commit=to.head)
    return str(done.commit_url)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _api() -> Any:
    library = importlib.import_module("huggingface_hub")
    return library.HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)


def _broken() -> tuple[type[Exception], ...]:
    """Errors of a network or a file system; the library's HTTP client has its own since version 1."""
    clients = (sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules)
    return (OSError, ValueError, *(client.HTTPError for client in clients))


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """The library's errors as DsrunErrors with the next step."""
    errors = importlib.import_module("huggingface_hub").errors
    again = "Unless its page shows a new commit, nothing of the model is there: then the same command again."
    try:
        yield
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        message = f"the Hub refuses {repository} ({status or 'no answer'}): {hub.first_line(error)}"
        why = "Does the token have the right to write there? `hf auth login`, or HF_TOKEN."
        if status == 412:
            message, why = f"{repository} was changed by somebody meanwhile", "Look at it."
        raise DsrunError(message, where=OPTION, hint=f"{why} {again}") from error
    except _broken() as error:
        endpoint = os.environ.get("HF_ENDPOINT")
        hint = f"Does HF_ENDPOINT answer: {endpoint}?" if endpoint else "Is there a network?"
        message = f"{repository} can't be pushed: {hub.first_line(error)}"
        raise DsrunError(message, where=OPTION, hint=f"{hint} {again}") from error
