"""A GGUF file's header: the facts of its model before it is converted, read with the package gguf."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError


def architecture_of(path: Path) -> dict[str, Any]:
    """The longest sequence that the model was made for, under transformers' name; empty where it is unknown.

    Raises DsrunError for what is no GGUF file, or is cut short. Without the package nothing is looked at: what converts
    the file asks for it.
    """
    if importlib.util.find_spec("gguf") is None:
        return {}
    try:
        reader = importlib.import_module("gguf").GGUFReader(path)
        kind = reader.get_field("general.architecture")
        field = reader.get_field(f"{kind.contents()}.context_length") if kind else None
        positions = field.contents() if field else None
    except (ValueError, IndexError, KeyError, TypeError) as error:
        hint = "Download it again, or use the Hugging Face folder that it was made from."
        raise DsrunError(f"can't be read as GGUF: {error}", where=str(path), hint=hint) from error
    return {"max_position_embeddings": int(positions)} if positions else {}
