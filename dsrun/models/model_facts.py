"""What is said of a model of the catalogue: the facts of its file, and the sizes that its config has."""

from __future__ import annotations

from typing import Any

from dsrun.models import model_files, multimodal
from dsrun.models.model_files import ModelFile
from dsrun.planner.model_config import ModelConfig
from dsrun.planner.shape import CHOSEN, EXPERT_COUNTS


def facts_of(model: ModelFile) -> dict[str, Any]:
    """A model's facts by their names in `dsrun models --json`; None where its file and config don't say one.

    The sizes are those of the text part: context in tokens, experts of one block. A size that can't be is left out,
    and reported by whatever plans or trains the model.
    """
    config = ModelConfig(multimodal.text_config(model.architecture), str(model.path))
    heads, experts = config.size("num_attention_heads"), config.size(*EXPERT_COUNTS, least=0) or None
    return {
        "name": model.name,
        "parameters": model.parameters,
        "summary": model.summary,
        "repository": model.repository,
        "network": config.values.get("model_type"),
        "context": config.size("max_position_embeddings"),
        "layers": config.size("num_hidden_layers"),
        "hidden_size": config.size("hidden_size"),
        "heads": heads,
        "kv_heads": config.size("num_key_value_heads") or heads,
        "experts": experts,
        "experts_per_token": config.size(*CHOSEN, least=0) if experts else None,
        "prompt_format": model.prompt_format,
        "licence": model.licence or None,
        "source": model.source or None,
        "file": model_files.file_label(model.name),
    }
