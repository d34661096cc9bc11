"""A training example as a line of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_CHARACTERS = 2000


def marked(example: Mapping[str, Any], most: int = MOST_CHARACTERS) -> str:
    """What is trained on in double brackets, line breaks as \\n; the middle of a longer text is left out.

    example: its "parts", each with "text" and whether it is "trained" (dsrun.training.data.tokenizing.parts_of).
    """
    text = "".join(f"⟦{part['text']}⟧" if part["trained"] else part["text"] for part in example["parts"])
    text = text.replace("\n", "\\n")
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
