"""Inference requests: made by dsrun.jobs.assembly.inference, read by dsrun.training.inference."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from dsrun.job.job import DataSpec


@dataclass(frozen=True)
class InferenceModel:
    """The model that answers, and its device."""

    folder: str
    """Folder of a model in transformers' or ChatGLM's format, or of an adapter that names its model."""
    prompt_format: str
    """A name in dsrun/training/data/prompts.py."""
    accelerator: str
    """"cuda" (the one GPU that the process sees) or "cpu"."""
    precision: str
    """"fp32", "bf16" or "fp16"."""
    adapter: str | None = None
    """Folder or file of an adapter for the model in `folder`."""
    thinking: str = "auto"
    """Whether the chat template asks for thoughts: "on", "off", or "auto", the template's own choice."""
    template_args: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template."""
    answers: dict[str, int] = field(default_factory=dict)
    """How many answers the run was trained on with and without thoughts (dsrun/data/thoughts.py), for "auto"."""


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
"""The sampling of ChatGLM2's own evaluation (ptuning/main.py); its top-k is the default of transformers 4.30."""


@dataclass(frozen=True)
class ChatRequest:
    """A conversation, or its only question."""

    model: InferenceModel
    decoding: Decoding
    max_new_tokens: int
    """Longest answer, in tokens."""
    system: str | None = None
    prompt: str | None = None
    """The only question; "-": the questions are on stdin; None: in the terminal."""


@dataclass(frozen=True)
class EvaluationRequest:
    """Loss and answers on the held-out examples in data.eval_file."""

    model: InferenceModel
    decoding: Decoding
    data: DataSpec
    limit: int | None
    """Only the first examples; None: all."""
    answers: int | None
    """How many prompts are answered; None: all."""
    micro_batch: int
    """Examples at once."""
    output: str
    """The file that the answers go to."""
    overwrite: bool
    metrics: str
    """How answers are scored: a value of finetune's option of the same name."""


def to_json(request: ChatRequest | EvaluationRequest) -> str:
    """One line of ASCII, for a command line: names of files need not be UTF-8."""
    return json.dumps(dataclasses.asdict(request))


def chat_request(text: str) -> ChatRequest:
    """The request that `to_json` wrote."""
    return ChatRequest(**_parts(text))


def evaluation_request(text: str) -> EvaluationRequest:
    """The request that `to_json` wrote."""
    raw = _parts(text)
    return EvaluationRequest(**{**raw, "data": DataSpec(**raw["data"])})


def _parts(text: str) -> dict[str, Any]:
    raw = json.loads(text)
    return {**raw, "model": InferenceModel(**raw["model"]), "decoding": Decoding(**raw["decoding"])}
