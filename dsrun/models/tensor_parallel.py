"""The division of the networks' matrices under tensor parallelism, in the words of DeepSpeed's AutoTP.

A block has two pairs of layers, each divided so that only its end needs an all-reduce (Megatron-LM, arXiv:1909.08053,
section 3): the first by columns (every rank has some of the heads, or of the feed-forward's width), the second by rows.
Embeddings, norms and the output layer are whole on every rank, so that each has all logits and the fused loss stays.

The division stands in deepspeed.json. transformers' own plan (`_tp_plan`) is not used: AutoTP refuses GLM's style
"rowwise_split_input", and with LoRA either throws its matrices away or divides nothing (module_inject/auto_tp.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SECTION = "tensor_parallel"
"""The section of a DeepSpeed config."""


@dataclass(frozen=True)
class Partition:
    """The last parts of the names of a network's linear layers, by how their weights ([out, in]) are divided."""

    columns: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    """Along `out`."""
    rows: tuple[str, ...] = ("o_proj", "down_proj")
    """Along `in`; what comes out is summed over the ranks."""
    pairs: tuple[str, ...] = ()
    """Two layers in one, each of them along its `out`."""
    per_head: tuple[str, ...] = ()
    """Norms of each head: whole on every rank, which applies them to its own heads. Their gradients are summed."""

    @property
    def layers(self) -> tuple[str, ...]:
        """All divided layers of a block."""
        return (*self.columns, *self.rows, *self.pairs)


SEPARATE_NORMED = Partition(per_head=("q_norm", "k_norm"))
SEPARATE, FUSED = Partition(), Partition(columns=("q_proj", "k_proj", "v_proj"), pairs=("gate_up_proj",))
NETWORKS: Mapping[str, Partition] = {
    "llama": SEPARATE, "mistral": SEPARATE, "qwen2": SEPARATE, "qwen3": SEPARATE_NORMED, "glm": FUSED,
}  # fmt: skip
"""model_type -> its division; the networks that were compared with one process of plain torch, number by number."""


def section(model_type: str, ranks: int, *, freezes: bool) -> dict[str, Any]:
    """The `tensor_parallel` section for a network of NETWORKS, with LoRA's matrices where there are some.

    freezes: the model's own weights stay as they are, the norms of heads among them. DeepSpeed would hang a hook on
    their gradients all the same, which torch refuses (register_replicated_grad_hooks in module_inject/auto_tp.py).

    Of a layer that is divided by columns LoRA's B ([out, rank]) is divided like its weight, of one by rows its A
    ([rank, in]); the other one of the two is whole.
    """
    partition = NETWORKS[model_type]
    specs: list[dict[str, Any]] = [
        {"patterns": _patterns(partition.rows, "A"), "partition_type": "row"},
        {"patterns": _patterns(partition.columns, "B"), "partition_type": "column"},
    ]
    if partition.pairs:
        patterns = _patterns(partition.pairs, "B")
        specs.append({"patterns": patterns, "partition_type": "column", "shape": [2, -1], "partition_dim": 0})
    if partition.per_head and not freezes:
        patterns = [rf".*\.({'|'.join(partition.per_head)})\.weight$"]
        specs.append({"patterns": patterns, "partition_type": "skip", "grad_allreduce": True})
    return {"autotp_size": ranks, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


def _patterns(names: tuple[str, ...], side: str) -> list[str]:
    """side: the matrix of LoRA's that is divided, too."""
    layers = "|".join(names)
    return [rf".*\.({layers})(\.base_layer)?\.weight$", rf".*\.({layers})\.lora_{side}\.[^.]+\.weight$"]


def divided_along(name: str) -> tuple[int | None, int]:
    """How a weight of one of NETWORKS is divided: along which dimension (None: not at all), and of how many layers in
    one each is. LoRA's matrices are as in `section`; what is added to a sum over ranks is whole."""
    *path, kind = name.split(".")
    layer = {part for part in path if part in _ALL}
    side = next((part[-1] for part in path if part in ("lora_A", "lora_B")), "")
    for partition in NETWORKS.values():
        if layer & {*partition.rows} and kind == "weight" and side in ("", "A"):
            return 1, 1
        if layer & {*partition.columns, *partition.pairs} and side in ("", "B"):
            return 0, 2 if layer & {*partition.pairs} else 1
    return None, 1


_ALL = {layer for partition in NETWORKS.values() for layer in partition.layers}
