"""Tiny checkpoints of any family that transformers has: its own architecture at small sizes, random, with a tokenizer.

The sizes of transformers' default config are made small wherever they stand; nothing is written down for a family but
what its parts must agree on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from byte_tokenizer import byte_tokenizer

VOCABULARY = 320
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # experts
    "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 16, "num_local_experts": 4, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
    # linear attention, latent attention, Gemma's layers
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_global_key_value_heads": 2,
    "global_head_dim": 16, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 32,
    "mamba_d_state": 16, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
    "num_kv_shared_layers": 0, "intermediate_size_mlp": 48,
    # towers
    "depth": 2, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4, "image_size": 16, "embed_dim": 32,
    "d_model": 32, "encoder_layers": 2, "projection_dim": 32, "vision_output_dim": 32,
}  # fmt: skip
"""The largest value of a size, by its key."""
SECTIONS = ("qwen2_5_vl_text", "qwen2_vl_text", "glm4v_text", "glm4v_moe_text")
"""Text parts that divide a head's width among an image's time, height and width, by default by their real width."""
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_config(model_type: str, **text: Any) -> Any:
    """transformers' config of a model_type at small sizes; text: fields of its text part."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    fields = _small(kind().to_dict())
    if model_type == "gemma4":
        fields["vision_config"] = fields["vision_config"] or _small(
            CONFIG_MAPPING["gemma4_vision"]().to_dict()
        )
    part = fields.get("text_config") or fields
    if model_type == "gemma4":
        part["global_head_dim"] = 16  # no scale but its norms: with 512 attention picks single tokens
    if part.get("kv_lora_rank"):
        part["num_key_value_heads"] = part["num_attention_heads"]  # keys and values come out of one matrix
    part.update(text)
    if part.get("model_type") in SECTIONS:
        rope = part.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0}
        width = part.get("head_dim") or part["hidden_size"] // part["num_attention_heads"]
        half = int(width * rope.get("partial_rotary_factor", 1)) // 2
        part["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    return kind.from_dict(fields)


def _small(fields: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict) and key.endswith("_config") and key != "per_layer_config":
            made[key] = _small(value)
        elif key in SMALL and isinstance(value, int) and not isinstance(value, bool):
            made[key] = min(value, SMALL[key])
        elif (key, value) == ("num_experts_per_tok", None) or (key in SMALL and isinstance(value, list)):
            made[key] = SMALL[key]
        elif key == "full_attn_idxs":
            made[key] = [1]
        elif key == "layer_types" and "full_attn_idxs" in fields:
            continue  # it follows from them
        elif key in {"layer_types", "mlp_layer_types"} and value:
            # Each kind once, where the last layer is another one; where all keep a state, as hybrids' defaults may.
            made[key] = [value[0], "full_attention" if {*value} == {"linear_attention"} else value[-1]]
        elif key in {"deepstack_visual_indexes", "fullatt_block_indexes"}:
            made[key] = [0, 1]
        elif key.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            made[key] = value if value < 256 else 300 + sum(map(ord, key)) % 20
        elif key != "per_layer_config":
            made[key] = value
    return made


def write_checkpoint(folder: Path, model_type: str, *, seed: int = 0, **text: Any) -> Any:
    """Write a whole checkpoint with its tokenizer into a new folder; returns the model."""
    from transformers.models.auto import modeling_auto

    config = tiny_config(model_type, **text)
    names = (
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING",
    )  # fmt: skip
    tables = (getattr(modeling_auto, name, {}) for name in names)
    kind = next(filter(None, (table.get(type(config), None) for table in tables)))
    torch.manual_seed(seed)
    model = kind._from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    specials = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    byte_tokenizer(TEMPLATE, specials).save_pretrained(folder)
    if config.get_text_config() is not config:
        (folder / "preprocessor_config.json").write_text('{"image_processor_type": "tiny"}', encoding="utf-8")
    return model.eval()
