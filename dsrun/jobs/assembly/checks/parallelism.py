"""The combinations of parallelism that finetune trains with: those that were compared, number by number, with one
process.

Everything else is refused before the start, by the functions of RULES; the tables in docs/reference/parallelism.md are
made by asking them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from dsrun.config import tree
from dsrun.config.presets.preset import SECOND_COPY
from dsrun.ds_config import ZERO, section, zero_stage
from dsrun.errors import Problem
from dsrun.jobs.assembly.checks.optimizers import offloads
from dsrun.models import multimodal, tensor_parallel
from dsrun.models.chatglm import network_of
from dsrun.options.optimizers import ADAMW, OPTIMIZERS
from dsrun.options.table import ATTENTIONS, OptimizerOptions, ParallelismOptions
from dsrun.words import counted

if TYPE_CHECKING:
    from dsrun.job.job import DataSpec, HostDevices, TrainingSpec
    from dsrun.options.commands import FinetuneOptions

QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")
EXPERTS = "expert_parallel"
"""The section of a DeepSpeed config by which AutoEP divides a mixture's experts."""
SDPA, TOKEN_MEAN = ATTENTIONS[1], OptimizerOptions.loss
PIPELINED = ("llama", "mistral", "qwen2", "qwen3", "glm")
"""Networks that were compared in stages."""
WINDOW_IS_OFF = ("qwen2", "qwen3")
"""Networks whose window counts only where use_sliding_window says so."""
ELEMENTWISE = tuple(name for name in OPTIMIZERS if name in (ADAMW, "sgd", "lion"))
"""Optimizers for which a part of a matrix is stepped as it would be in the whole one."""
EXPERT_NETWORKS = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "deepseek_v2",
    "deepseek_v3",
)
"""Networks whose experts were divided, and compared."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys of a config with the experts of a layer."""
SHARED = (*tensor_parallel.NETWORKS,)
"""Networks whose sequences are divided as tokens of one process are computed."""


@dataclass(frozen=True, kw_only=True)
class ParallelSetup:
    """The facts about a fine-tune that decide whether its kind of parallelism works."""

    parallel: ParallelismOptions
    devices: tuple[int, ...]
    """Ranks of each host."""
    stage: int = 2
    """ZeRO's."""
    fsdp: bool = False
    """Whether the preset is FSDP's, and DeepSpeed has no part in it."""
    offload: bool = False
    """Whether the optimizer or the weights are kept outside the GPU."""
    second_copy: bool = False
    """Whether ZeRO-3 keeps a second copy of the weights in groups of ranks (ZeRO++'s hpZ)."""
    quantized: bool = False
    """Whether it sends weights or gradients in fewer bits than 16 (ZeRO++)."""
    method: str = "full"
    """What is trained."""
    optimizer: str = ADAMW
    loss: str = TOKEN_MEAN
    attention: str = "auto"
    packing: bool = True
    official: bool = False
    network: str | None = "llama"
    """model_type; None where it isn't known yet."""
    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    window: int | None = None
    """Tokens that attention looks back, where that is not all; None: all."""
    length: int = 0
    """Tokens of the longest example."""
    precision: str | None = "fp32"
    fused_loss: bool = False
    """Whether that was asked for."""
    tiles: bool = False
    """Whether the loss and the MLPs take some tokens at a time."""
    by_tokens: bool = False
    """Whether a step has as many examples as --tokens-per-batch has room for."""
    answers: bool = False
    """Whether held-out prompts are answered."""
    experts: int | None = None
    """Experts of a layer; None for a dense network, or one that isn't known yet."""
    router_loss: bool = False
    """Whether the model's config asks for the routers' loss."""
    compiled: bool = False
    """Whether layers are compiled."""

    @property
    def world_size(self) -> int:
        """Ranks over all hosts."""
        return sum(self.devices)


def window_of(architecture: Mapping[str, Any]) -> int | None:
    """Tokens that a network's attention looks back, by its config; None where it sees all, or there is no such key.

    Where Mistral's says nothing, transformers has 4096 (MistralConfig).
    """
    own = 4096 if architecture.get("model_type") == "mistral" else None
    window = architecture.get("sliding_window", own)
    used = architecture.get("use_sliding_window", architecture.get("model_type") not in WINDOW_IS_OFF)
    return int(window) if window and used else None


def network_fields(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ParallelSetup from a transformers config; None for those that it lacks."""
    heads, text = architecture.get("num_attention_heads"), multimodal.text_config(architecture)
    counts = (text.get(name) for name in EXPERT_COUNTS)
    return {
        "network": network_of(architecture), "heads": heads,
        "kv_heads": architecture.get("num_key_value_heads") or heads,
        "layers": architecture.get("num_hidden_layers"), "window": window_of(architecture),
        "experts": next((count for count in counts if isinstance(count, int)), None),
        "router_loss": text.get("output_router_logits") is True,
    }  # fmt: skip


def setup_of(
    parallel: ParallelismOptions,
    hosts: Sequence[HostDevices],
    ds_config: Mapping[str, Any],
    training: FinetuneOptions | TrainingSpec,
    data: FinetuneOptions | DataSpec,
    *,
    method: str,
    precision: str | None,
    fsdp: bool,
    architecture: Mapping[str, Any],
) -> ParallelSetup:
    """A fine-tune's, of its options or of its stored job. hosts: none where they aren't known yet."""
    return ParallelSetup(
        parallel=parallel, devices=tuple(len(host.devices) for host in hosts) or (parallel.group,),
        stage=zero_stage(ds_config), fsdp=fsdp, offload=offloads(ds_config), method=method,
        optimizer=training.optimizer, loss=training.loss, packing=training.packing, attention=training.attention,
        official=data.official, length=data.max_source_length + data.max_target_length, precision=precision,
        fused_loss=bool(training.liger), tiles=bool(training.tile_tokens),
        by_tokens=training.tokens_per_batch is not None, answers=training.generate_rows > 0,
        compiled=bool(training.compile),
        **network_fields(architecture), **_zero_plus_plus(ds_config),
    )  # fmt: skip


def _zero_plus_plus(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ParallelSetup from ZeRO++'s keys; at stage 3, where they are read."""
    zero, copies = section(ds_config, ZERO), tree.get(ds_config, SECOND_COPY)
    return {
        "second_copy": zero.get("stage") == 3 and isinstance(copies, int) and copies > 1,
        "quantized": zero.get("stage") == 3 and any(zero.get(name) is True for name in QUANTIZED),
    }


def refusals(setup: ParallelSetup) -> list[Problem]:
    """A problem for each reason why the job can't be trained like that, with the nearest that can. Empty if it can."""
    first = list(two_at_once(setup))
    return first or [problem for rule in RULES for problem in rule(setup)]


def notes(setup: ParallelSetup) -> list[str]:
    """Remarks on a set-up that works."""
    tp, kv_heads = setup.parallel.tp, setup.kv_heads
    if kv_heads and tp > kv_heads:
        return [
            f"--tp {tp}: {tp - kv_heads} of {tp} ranks have no part of the attention: {kv_heads} key/value heads"
        ]
    return []


IDLE = 0.25
"""Share of the time from which a pipeline's waiting is worth a remark."""


def idle(pp: int, micro_steps: int) -> list[str]:
    """A remark on how long ranks wait for one another, with p stages and m micro batches: (p-1)/(m+p-1)
    (arXiv:1811.06965)."""
    share = (pp - 1) / (micro_steps + pp - 1)
    if share < IDLE:
        return []
    return [
        f"--pp {pp}: with {micro_steps} micro batches a step each rank waits {share:.0%} of the time; smaller ones "
        "(--micro-batch) or more of them (--grad-accum) shorten that"
    ]


def sizes(setup: ParallelSetup) -> Iterator[Problem]:
    """Ranks that work on the same examples make whole groups, with heads and layers for each of them."""
    if faults := "; ".join(_size_faults(setup)):
        yield Problem(faults, setup.parallel.words, f"{_nearest(setup)}.")


def _size_faults(setup: ParallelSetup) -> Iterator[str]:
    """Why there can't be groups of that size."""
    group, neighbours = setup.parallel.group, setup.parallel.group // setup.parallel.pp
    if group == 1:  # which divides experts, if anything
        return
    if setup.world_size % group:
        yield f"{counted(setup.world_size, 'rank')} can't make groups of {group}"
    elif split := [count for count in setup.devices if count % neighbours]:
        # Its ranks exchange what every layer computes.
        yield f"a group of {neighbours} ranks would lie on two hosts, one of which has {split[0]} ranks"
    if setup.layers is not None and setup.layers < setup.parallel.pp:
        yield f"the model has {setup.layers} layers"
    if setup.heads is not None and setup.kv_heads is not None:
        yield from _head_faults(setup, setup.heads, setup.kv_heads)


def _head_faults(setup: ParallelSetup, heads: int, kv_heads: int) -> Iterator[str]:
    """Problems of heads. Tensor-parallel ranks have whole heads, beside LoRA equally many. Sequence-parallel ranks
    have as many as the others, for which those of keys and values may be repeated."""
    tp, sp = setup.parallel.tp, setup.parallel.sp
    if tp > heads:
        yield f"the model has {heads} attention heads"
    elif tp > 1 and setup.method != "full" and (heads % tp or kv_heads % tp):
        yield f"{heads} attention heads and {kv_heads} of keys and values are no equal shares for LoRA"
    if heads % sp or (kv_heads % sp and sp % kv_heads):
        yield f"{heads} attention heads, {kv_heads} of keys and values, can't be shared equally by {sp} ranks"


def _nearest(setup: ParallelSetup) -> str:
    """The size that is nearest to the one that was asked for, of those that these ranks and this model can have; else
    the nearest that the model can."""
    ((kind, wanted),) = ((name, size) for name, size in asdict(setup.parallel).items() if size > 1)
    others = [
        replace(setup, parallel=ParallelismOptions(**{kind: size}))
        for size in sorted(range(2, max(setup.world_size, wanted) + 1), key=lambda size: abs(size - wanted))
    ]
    if here := next((candidate for candidate in others if not any(_size_faults(candidate))), None):
        return f"The nearest that fits: {here.parallel.words}"
    alone = (replace(candidate, devices=(candidate.parallel.group,)) for candidate in others)
    if fewer := next((candidate for candidate in alone if not any(_size_faults(candidate))), None):
        return f"Leave it out, or take {fewer.parallel.words} on {fewer.world_size} devices"
    return "Leave it out"


def divided_networks(setup: ParallelSetup) -> Iterator[Problem]:
    """AutoTP divides what its patterns name; only for these networks the result was compared."""
    if setup.parallel.tp > 1 and setup.network is not None and setup.network not in tensor_parallel.NETWORKS:
        yield Problem(
            f"{setup.network} is not known to be divided rightly", f"--tp {setup.parallel.tp}",
            f"Networks that are: {', '.join(tensor_parallel.NETWORKS)}. Without --tp, zero3 divides the weights.",
        )  # fmt: skip


def divided_methods(setup: ParallelSetup) -> Iterator[Problem]:
    """A prefix has keys and values of all heads, and weights in 4 bits are no matrices."""
    if setup.parallel.tp > 1 and setup.method not in ("full", "lora"):
        fault = f"can't be divided under --method {setup.method}"
        yield Problem(fault, f"--tp {setup.parallel.tp}", "Take --method lora, or leave --tp out.")


def divided_optimizers(setup: ParallelSetup) -> Iterator[Problem]:
    """Muon orthogonalises a whole matrix; 8-bit states have blocks that a part cuts otherwise."""
    if setup.parallel.tp > 1 and setup.optimizer not in ELEMENTWISE:
        fault = f"a part of a matrix is not stepped as the whole one by --optimizer {setup.optimizer}"
        yield Problem(fault, f"--tp {setup.parallel.tp}", f"Take one of {', '.join(ELEMENTWISE)}.")


def another_engine(setup: ParallelSetup) -> Iterator[Problem]:
    """Both are DeepSpeed's."""
    if not setup.parallel.alone and setup.fsdp:
        hint = f"Take --preset {'zero1' if setup.parallel.pp > 1 else 'zero3'}."
        yield Problem("is DeepSpeed's, and the preset FSDP's", setup.parallel.words, hint)


APART = {
    ("tp", "sp"): "AutoTP puts its own groups in the place of Ulysses'",
    (
        "tp",
        "pp",
    ): "AutoTP's groups replace the pipeline's, and one stage's weights are sent to another's ranks",
    ("tp", "ep"): "AutoTP and AutoEP share their groups, which nobody has compared with one process yet",
    ("sp", "ep"): "an expert's tokens of a divided sequence were not compared with one process",
    ("pp", "ep"): "AutoEP looks for its layers in a whole model, and a stage has a part of one",
    ("sp", "pp"): "positions, which keep examples of a divided sequence apart, don't go from stage to stage",
}
"""Why two kinds don't go together (DeepSpeed 0.19: runtime/engine.py, _configure_tensor_parallel_states).

tp 2 x pp 2 was tried on four ranks with 0.19.8: `deepspeed.initialize` ends in `_broadcast_model`, whose groups
(`groups._get_sequence_data_parallel_group`) then have a rank of either stage, with weights of other sizes.
"""


def two_at_once(setup: ParallelSetup) -> Iterator[Problem]:
    """One message for all kinds that were asked for together."""
    sizes = {name: size for name, size in asdict(setup.parallel).items() if size > 1}
    if len(sizes) < 2:
        return
    one_at_a_time = (ParallelismOptions(**{name: size}) for name, size in sizes.items())
    near = next((way for way in one_at_a_time if not refusals(replace(setup, parallel=way))), None)
    hint = "Take one of them."
    if near:
        shares = setup.world_size // near.group
        hint = f"The nearest that can be: {near.words}" + (
            f", {shares} times beside one another." if shares > 1 else "."
        )
    why = next(text for pair, text in APART.items() if set(pair) <= set(sizes))
    yield Problem(f"can't be combined: {why}", setup.parallel.words, hint)


def shared_networks(setup: ParallelSetup) -> Iterator[Problem]:
    """Networks whose results were compared."""
    if setup.parallel.sp > 1 and setup.network is not None and setup.network not in SHARED:
        fault = f"{setup.network} is not known to be right with its sequences divided"
        yield Problem(fault, f"--sp {setup.parallel.sp}", f"Networks that are: {', '.join(SHARED)}.")


def shared_attention(setup: ParallelSetup) -> Iterator[Problem]:
    """DeepSpeed's wrapper throws masks away: packed examples are kept apart by dsrun's own attention alone."""
    if setup.parallel.sp > 1 and setup.attention not in ("auto", "varlen"):
        fault = f"--attention {setup.attention} is not told where the examples of a divided sequence begin"
        yield Problem(fault, f"--sp {setup.parallel.sp}", "Take --attention varlen, or leave it out.")


def shared_examples(setup: ParallelSetup) -> Iterator[Problem]:
    """A micro batch is one packed sequence, of which each rank has its tokens; the recipe counts examples."""
    option = f"--sp {setup.parallel.sp}"
    if setup.parallel.sp == 1:
        return
    if setup.official:
        yield Problem("--official packs nothing", option, "Leave one of the two out.")
    elif setup.loss != TOKEN_MEAN:
        yield Problem(f"--loss {setup.loss} packs nothing", option, f"Take --loss {TOKEN_MEAN}.")
    elif not setup.packing:
        yield Problem(
            "a micro batch is one packed sequence", option, "Leave --no-packing out: losses are the same."
        )


def shared_methods(setup: ParallelSetup) -> Iterator[Problem]:
    """A prefix has keys and values of no place in the sequence; QLoRA was not compared."""
    if setup.parallel.sp > 1 and setup.method not in ("full", "lora"):
        fault = f"was not tried with --method {setup.method}"
        yield Problem(fault, f"--sp {setup.parallel.sp}", "Take --method lora, or leave --sp out.")


def offloading(setup: ParallelSetup) -> Iterator[Problem]:
    """Nobody has compared it yet."""
    if not setup.parallel.alone and setup.offload:
        fault, stage = "not tried together with offload", 1 if setup.parallel.pp > 1 else max(setup.stage, 2)
        yield Problem(fault, setup.parallel.words, f"Take --preset zero{stage}, which offloads nothing.")


def second_copies(setup: ParallelSetup) -> Iterator[Problem]:
    """DeepSpeed makes hpZ's groups of neighbouring ranks, whatever they hold (utils/groups.py,
    _create_zero_param_parallel_group): tp 2 on four ranks trained on, and the loss was 0.2 off after two steps.
    Quantized collectives need CUDA, and nobody has compared them there."""
    if setup.parallel.tp > 1 and setup.second_copy:
        fault = (
            "ZeRO++'s second copy is put together from neighbouring ranks, which have parts of other weights"
        )
        yield Problem(fault, f"--tp {setup.parallel.tp}", "Take --preset zero3, which has none.")
    if setup.parallel.ep > 1 and setup.second_copy:
        fault = "DeepSpeed doesn't do it with ZeRO++'s second copy (runtime/engine.py)"
        yield Problem(fault, f"--ep {setup.parallel.ep}", "Take --preset zero3, which has none.")
    if setup.parallel.group * setup.parallel.ep > setup.parallel.pp and setup.quantized:
        fault = f"not tried with ZeRO++'s {' and '.join(QUANTIZED)}"
        yield Problem(fault, setup.parallel.words, "Leave those out.")


def stages(setup: ParallelSetup) -> Iterator[Problem]:
    """Refuse models whose layers are not known to be computed rightly in stages."""
    pp, option = setup.parallel.pp, f"--pp {setup.parallel.pp}"
    if pp == 1:
        return
    if setup.network is not None and setup.network not in PIPELINED:
        hint = f"Networks that are: {', '.join(PIPELINED)}. Without --pp, zero3 divides the weights."
        yield Problem(f"{setup.network} is not known to be right in stages", option, hint)
    if setup.window is not None and setup.window < setup.length:
        fault = f"attention looks back {setup.window} tokens of {setup.length}, and no mask goes from stage to stage"
        yield Problem(
            fault, option, f"Take examples of {setup.window} tokens at most, or zero3 in its place."
        )


def in_stages(setup: ParallelSetup) -> Iterator[Problem]:
    """Refuse the options that a pipeline can't be combined with, each with a way out."""
    known = (
        (setup.stage > 1 and not setup.offload,
         f"ZeRO-{setup.stage} divides gradients that a stage sums (runtime/pipe/engine.py)",
         "Take --preset zero1."),
        (setup.stage == 0, "without ZeRO DeepSpeed clips by the first stage's norm (runtime/utils.py)",
         "Take --preset zero1."),
        (setup.method != "full", f"not tried with --method {setup.method}", "Take --method full, or leave --pp out."),
        (setup.optimizer not in ELEMENTWISE, f"not tried with --optimizer {setup.optimizer}",
         f"Take one of {', '.join(ELEMENTWISE)}."),
        (setup.precision == "fp16", "not tried in fp16", "Take --precision bf16 or fp32."),
        (setup.packing, "packed examples are kept apart by their positions, which don't go from stage to stage",
         "Leave --packing out."),
        (setup.attention != SDPA, f"not tried with --attention {setup.attention}", f"Take --attention {SDPA}."),
        (setup.fused_loss, "the last stage computes the loss by itself", "Leave --liger out."),
        (setup.tiles, "the last stage computes the loss by itself", "Take --tile-tokens 0."),
        (setup.official, "--official's loss is a mean of micro batches' means, and a pipeline's of a step's tokens",
         "Leave one of the two out."),
        (setup.loss != TOKEN_MEAN and not setup.official,
         f"its loss is the mean of a step's tokens, and not --loss {setup.loss}", f"Take --loss {TOKEN_MEAN}."),
        (setup.by_tokens, "a pipeline takes the same number of micro batches in each step", "Take --global-batch."),
        (setup.answers, "an answer takes a whole model for each token, and a rank has a part of it",
         "Take --generate-rows 0; dsrun evaluate RUN answers with the exported model."),
    )  # fmt: skip
    if setup.parallel.pp > 1 and not setup.fsdp:  # which is said by then
        yield from (Problem(fault, f"--pp {setup.parallel.pp}", hint) for bad, fault, hint in known if bad)


def divided_experts(setup: ParallelSetup) -> Iterator[Problem]:
    """Refuse the networks and the numbers for which experts are not known to be divided rightly."""
    ep, option = setup.parallel.ep, f"--ep {setup.parallel.ep}"
    if ep == 1 or setup.network is None:
        return
    if setup.experts is None:
        hint = "Leave it out: the preset's ZeRO stage divides the model."
        yield Problem(f"{setup.network} has no experts to divide", option, hint)
    elif setup.network not in EXPERT_NETWORKS:
        hint = f"Networks that are: {', '.join(EXPERT_NETWORKS)}. Without --ep, zero3 divides experts as all weights."
        yield Problem(f"the experts of {setup.network} are not known to be divided rightly", option, hint)
    elif faults := _expert_faults(setup, ep):
        sizes = [size for size in range(2, setup.world_size + 1) if not _expert_faults(setup, size)]
        near = f"Sizes that do: {', '.join(map(str, sizes))}." if sizes else "Leave it out."
        yield Problem(faults, option, near)
    if setup.router_loss and setup.network in ("qwen3_5_moe", "qwen3_5_moe_text"):
        fault = "for the routers' loss AutoEP takes Qwen3.5's softmax a second time (DeepSpeed 0.19.8)"
        yield Problem(fault, option, "Set output_router_logits to false in config.json, or leave --ep out.")


def _expert_faults(setup: ParallelSetup, ep: int) -> str:
    """Why `ep` ranks can't divide the experts; empty if they can."""
    faults = (
        [f"{counted(setup.world_size, 'rank')} can't make groups of {ep}"] if setup.world_size % ep else []
    )
    faults += (
        [f"{setup.experts} experts are no equal shares for {ep} ranks"] if (setup.experts or 0) % ep else []
    )
    return "; ".join(faults)


def beside_experts(setup: ParallelSetup) -> Iterator[Problem]:
    """Refuse the options with which divided experts were not compared, each with a way out."""
    known = (
        (setup.stage == 0, "without ZeRO DeepSpeed keeps their optimizer in files of its own, which dsrun doesn't read",
         "Take --preset zero1."),
        (setup.method != "full", f"not tried with --method {setup.method}", "Take --method full, or leave --ep out."),
        (setup.optimizer not in ELEMENTWISE, f"not tried with --optimizer {setup.optimizer}",
         f"Take one of {', '.join(ELEMENTWISE)}."),
        (setup.precision == "fp16", "not tried in fp16", "Take --precision bf16 or fp32."),
        (setup.fused_loss, "not tried with liger's kernels", "Leave --liger out."),
        (setup.compiled, "layers that send tokens to other ranks are not compiled", "Leave --compile out."),
    )  # fmt: skip
    if setup.parallel.ep > 1 and not setup.fsdp:  # which is said by then
        yield from (Problem(fault, f"--ep {setup.parallel.ep}", hint) for bad, fault, hint in known if bad)


Rule = Callable[[ParallelSetup], Iterator[Problem]]
RULES: tuple[Rule, ...] = (
    sizes, another_engine, divided_networks, divided_methods, divided_optimizers, shared_networks,
    shared_attention, shared_examples, shared_methods, offloading,
    second_copies, stages, in_stages, divided_experts, beside_experts,
)  # fmt: skip


def with_section(
    ds_config: dict[str, Any], network: str | None, parallel: ParallelismOptions, *, freezes: bool
) -> dict[str, Any]:
    """The config with what DeepSpeed has to be told: how the model is divided. freezes: an adapter is trained."""
    if parallel.ep > 1:
        ds_config = {**ds_config, EXPERTS: {"enabled": True, "autoep_size": parallel.ep}}
    if parallel.tp == 1 or network is None:
        return ds_config
    divided = tensor_parallel.section(network, parallel.tp, freezes=freezes)
    return {**ds_config, tensor_parallel.SECTION: divided}
