"""Models with random weights: the real architecture at the size that a model file gives, with its tokenizer."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.job.job import ModelSpec

logger = logging.getLogger(__name__)


def build_random_model(spec: ModelSpec, corpus: Path, folder: Path) -> None:
    """Write a Hugging Face folder with the spec's architecture, random weights and a trained tokenizer.

    corpus: a folder with the JSONL files that the tokenizer is trained on (every text in them); folder: an
    existing, empty folder. The weights depend on the architecture and its seed alone.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from dsrun.training.models.tokenizer import fast_tokenizer, train_sentencepiece

    fields = dict(spec.architecture)
    seed = fields.pop("seed")
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    if "partial_rotary_factor" in fields:
        rope["partial_rotary_factor"] = fields.pop("partial_rotary_factor")
    config = AutoConfig.for_model(**fields, rope_parameters=rope)

    logger.info("training the tokenizer of %s on %s", spec.name, corpus)
    model_file = folder / "tokenizer.model"
    options = spec.tokenizer
    train_sentencepiece(_texts(corpus), options["vocab_size"], options["max_piece_length"], model_file)
    tokenizer = fast_tokenizer(model_file, spec.tokenizer["style"])
    if len(tokenizer) > config.vocab_size:
        what = f"the tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size}"
        raise DsrunError(what, where=spec.location)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _texts(corpus: Path) -> list[str]:
    texts = []
    for path in sorted(corpus.glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            texts += [text for line in file for text in json.loads(line).values() if isinstance(text, str)]
    return texts
