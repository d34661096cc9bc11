"""What a model is asked, as a value: made by dsrun.jobs.answering, read by two modules of dsrun.training."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from dsrun.jobs.job import DataSpec


@dataclass(frozen=True)
class Model:
    """Who is asked. folder: a model's, in transformers' format or ChatGLM's, or an adapter's that names its model.

    prompt_format: a name in dsrun/training/prompts.py. accelerator: "cuda" (the one GPU that the process sees) or
    "cpu". precision: "fp32", "bf16" or "fp16". adapter: a folder or file of what was trained beside the model in
    `folder`.
    """

    folder: str
    prompt_format: str
    accelerator: str
    precision: str
    adapter: str | None = None


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen. temperature 0: the likeliest, always. top_p 1 and top_k 0: among all tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __str__(self) -> str:
        if not self.temperature:
            return "greedy"
        top_k = f", top-k {self.top_k}" if self.top_k else ""
        return f"temperature {self.temperature:g}, top-p {self.top_p:g}{top_k}, seed {self.seed}"


CHATGLM2 = Decoding(temperature=0.95, top_p=0.7, top_k=50)
"""How ChatGLM2's own evaluation draws (ptuning/main.py); the top-k is what transformers 4.30 took unless told."""


@dataclass(frozen=True)
class Talk:
    """A conversation. max_new_tokens: of one answer. prompt: the only question, "-" for what stdin holds; None: the
    terminal's user asks."""

    model: Model
    decoding: Decoding
    max_new_tokens: int
    system: str | None = None
    prompt: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """Held-out rows (data.eval_file), their loss and the answers to them.

    limit: only the first so many rows; answers: so many of their prompts are answered; None: all. micro_batch: rows
    at once. output: the file that the answers go to; overwrite: even if it is there.
    """

    model: Model
    decoding: Decoding
    data: DataSpec
    limit: int | None
    answers: int | None
    micro_batch: int
    output: str
    overwrite: bool


def to_json(question: Talk | Evaluation) -> str:
    """One line of ASCII, for a command line: names of files need not be UTF-8."""
    return json.dumps(dataclasses.asdict(question))


def talk(text: str) -> Talk:
    """The Talk that `to_json` wrote."""
    return Talk(**_parts(text))


def evaluation(text: str) -> Evaluation:
    """The Evaluation that `to_json` wrote."""
    raw = _parts(text)
    return Evaluation(**{**raw, "data": DataSpec(**raw["data"])})


def _parts(text: str) -> dict[str, Any]:
    raw = json.loads(text)
    return {**raw, "model": Model(**raw["model"]), "decoding": Decoding(**raw["decoding"])}
