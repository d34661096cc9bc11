"""Data sets of the Hugging Face Hub by name: `hf:OWNER/NAME`, read with `datasets` into a JSONL file in the cache.

`hf:OWNER/NAME[@REVISION][/SUBSET][#SPLIT]`; the split is train where none is named. No code of a data set is run: the
library can't since its version 4.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import secrets
from pathlib import Path
from typing import Any

from dsrun.data.cache import cache_root
from dsrun.errors import DsrunError

HUB = "hf:"
NAME = re.compile(
    r"hf:(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-]+))?(/(?P<subset>[\w.-]+))?"
    r"(#(?P<split>[^#]+))?"
)
AS_IN = "As in hf:tatsu-lab/alpaca, hf:OWNER/NAME/SUBSET or hf:OWNER/NAME#validation."


def local_file(path: Path, where: str) -> Path:
    """The file itself, or for a data set's name a JSONL file of its rows, made where the cache lacks it.

    `datasets` asks the Hub for the newest revision, and takes its own cache where the Hub is out of reach. where: the
    option. Raises DsrunError where there is no such data set or split, with the next step.
    """
    text = str(path)
    if not text.startswith(HUB):
        return path.absolute()
    name = NAME.fullmatch(text)
    if name is None:
        raise DsrunError(f"{text!r} names no data set", where=where, hint=AS_IN)
    if importlib.util.find_spec("datasets") is None:
        hint = "Install it: pip install datasets"
        raise DsrunError(f"{text} needs the package datasets", where=where, hint=hint)
    rows = _load(name, text, where)
    stem = re.sub(r"[^\w.-]", "_", text.removeprefix(HUB))
    target = cache_root() / "datasets" / f"{stem}-{rows._fingerprint}.jsonl"
    if not target.exists():
        _write(rows, target, text, where)
    return target


def _load(name: re.Match[str], text: str, where: str) -> Any:
    library = importlib.import_module("datasets")
    try:
        return library.load_dataset(
            name["id"], name["subset"], split=name["split"] or "train", revision=name["revision"]
        )
    except library.exceptions.DatasetNotFoundError as error:
        hint = "Check the name; a gated one takes its terms accepted on its page, then `hf auth login`. Or pass a file."
        raise DsrunError(f"{text}: {_first_line(error)}", where=where, hint=hint) from error
    except (OSError, ValueError, RuntimeError) as error:
        hint = f"{AS_IN} Without a network, download the files elsewhere and pass them."
        raise DsrunError(f"{text} can't be read: {_first_line(error)}", where=where, hint=hint) from error


def _write(rows: Any, target: Path, text: str, where: str) -> None:
    """Write the whole file or none. Two processes that write it at once write the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        rows.to_json(temporary, lines=True, force_ascii=False)
        temporary.replace(target)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        hint = "Rows must be text, numbers and lists of them. Is the disk full?"
        raise DsrunError(
            f"{text} can't be written as rows: {_first_line(error)}", where=where, hint=hint
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
