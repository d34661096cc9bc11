"""A division of memory in words: what stood beside the plan, what is more than planned, and what gives it back."""

from __future__ import annotations

from collections.abc import Sequence

from dsrun.job.memory_division import (
    ACTIVATIONS,
    BUCKETS,
    CACHE,
    GATHERED,
    GRADIENTS,
    INPUTS,
    LOGITS,
    OUTPUTS,
    STATES,
    STEP,
    UNKNOWN,
    WEIGHTS,
    MemoryDivision,
    OwnedMemory,
)

HOLES, OTHERS, HOST = "holes", "other processes and CUDA itself", "host"
CHINESE = {
    WEIGHTS: "权重", GRADIENTS: "梯度", STATES: "优化器状态", ACTIVATIONS: "激活值", LOGITS: "logits 与损失",
    BUCKETS: "通信桶", GATHERED: "聚集的权重", STEP: "优化器步骤的临时量", CACHE: "KV 缓存", OUTPUTS: "保留的输出",
    INPUTS: "输入", UNKNOWN: "来源不明", HOLES: "空洞", OTHERS: "其他进程与 CUDA 自身",
}  # fmt: skip
REMEDIES = {
    WEIGHTS: (
        "fewer bytes for each weight (bf16, 4 bits with QLoRA), or weights divided over more GPUs (ZeRO-3, FSDP)",
        "减少每个权重的字节数（bf16、QLoRA 的 4 位），或把权重分到更多 GPU（ZeRO-3、FSDP）",
    ),
    GRADIENTS: (
        "gradients divided over the ranks (ZeRO-2 or 3, FSDP), fewer trained weights (LoRA), or a smaller micro batch",
        "把梯度分到各进程（ZeRO-2 或 3、FSDP），减少训练的权重（LoRA），或减小 micro batch",
    ),
    STATES: (
        "states divided over the ranks (ZeRO, FSDP) or moved to the host (offload_optimizer), an 8-bit optimizer, or "
        "LoRA",
        "把状态分到各进程（ZeRO、FSDP）或放到主机内存（offload_optimizer），用 8 位优化器，或 LoRA",
    ),
    ACTIVATIONS: (
        "activation checkpointing, a smaller micro batch, or shorter examples",
        "激活重计算，更小的 micro batch，或更短的样本",
    ),
    LOGITS: (
        "a loss that makes no logits of all tokens (liger-kernel's fused one, or in tiles), a smaller micro batch (for "
        "an evaluation: per_device_eval_batch_size), or shorter examples",
        "不产生全部 logits 的损失（liger-kernel 的融合损失，或分块），更小的 micro batch（评估时："
        "per_device_eval_batch_size），或更短的样本",
    ),
    BUCKETS: (
        "smaller buckets (reduce_bucket_size, allgather_bucket_size; of DDP bucket_cap_mb), overlap_comm off",
        "更小的桶（reduce_bucket_size、allgather_bucket_size；DDP 的 bucket_cap_mb），关闭 overlap_comm",
    ),
    GATHERED: (
        "fewer gathered weights at once (stage3_max_live_parameters, stage3_max_reuse_distance, "
        "stage3_prefetch_bucket_size)",
        "减少同时聚集的权重（stage3_max_live_parameters、stage3_max_reuse_distance、stage3_prefetch_bucket_size）",
    ),
    STEP: (
        "a fused optimizer, or one that steps in parts (foreach=False; at stage 3 a smaller sub_group_size)",
        "融合的优化器，或分块更新（foreach=False；stage 3 时更小的 sub_group_size）",
    ),
    CACHE: (
        "fewer or shorter answers at once, a smaller share for it (vLLM: gpu_memory_utilization, max_model_len), "
        "or while training use_cache=False",
        "减少同时生成的条数或长度，减小缓存的份额（vLLM：gpu_memory_utilization、max_model_len），训练时 "
        "use_cache=False",
    ),
    OUTPUTS: (
        "outputs of an evaluation moved to the host more often (eval_accumulation_steps), or only what the metric "
        "needs (preprocess_logits_for_metrics, prediction_loss_only)",
        "更常把评估的输出移到主机（eval_accumulation_steps），或只保留指标所需"
        "（preprocess_logits_for_metrics、prediction_loss_only）",
    ),
    INPUTS: ("a smaller micro batch, or shorter examples", "更小的 micro batch，或更短的样本"),
    HOLES: (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    OTHERS: (
        "a GPU that nobody else uses (nvidia-smi names the processes)",
        "换一张没有其他进程的 GPU（nvidia-smi 会列出进程）",
    ),
}
"""What gives an owner's memory back, in English and Chinese."""
CUDA_GIB = 2.0
"""GiB that CUDA and NCCL may take themselves: more is other processes'."""
MORE_THAN_PLANNED = 0.25
"""GiB beyond the plan from which an owner is said to be above it."""
MOST_OWNERS, SHOWN = 8, 0.001
"""Owners that are listed, and the share of what is in use from which one without a plan is."""


def suspect(division: MemoryDivision) -> str:
    """The owner whose memory decided: holes that would have held the request, other processes, what is furthest above
    its plan, or else the largest; empty where nothing is known."""
    requested, holes = division.requested_gib or 0.0, division.holes_gib or 0.0
    if 0 < requested <= holes and (division.largest_hole_gib or 0.0) < requested and not division.later:
        return HOLES
    others = division.others_gib or 0.0
    if others > max(CUDA_GIB, 0.1 * (division.total_gib or 0.0), requested):
        return OTHERS
    above = above_plan(division.owners)
    if above:
        return above.owner
    known = [one for one in division.owners if one.owner in REMEDIES]
    return known[0].owner if known else ""


def above_plan(owners: Sequence[OwnedMemory]) -> OwnedMemory | None:
    """The owner that is furthest above what was planned for it, by more than MORE_THAN_PLANNED."""
    planned = [(one.gib - one.planned_gib, one) for one in owners if one.planned_gib is not None]
    excess, owned = max(planned, default=(0.0, None), key=lambda item: item[0])
    return owned if excess > MORE_THAN_PLANNED else None


def headline(division: MemoryDivision, chinese: bool) -> str:
    """The owner that decided, and where it failed, in a sentence or two; empty where nothing is known."""
    text = _of_ranks(division, chinese) if division.place == HOST else _of_owner(division, chinese)
    facts = [fact for fact in (division.when, division.failed_in) if fact]
    if text and facts:
        text += f"失败处：{'，'.join(facts)}。" if chinese else f" It failed here: {', in '.join(facts)}."
    return text


def _of_owner(division: MemoryDivision, chinese: bool) -> str:
    owner = suspect(division)
    name = _name(owner, chinese)
    if owner == HOLES:
        holes, largest = size(division.holes_gib), size(division.largest_hole_gib)
        if chinese:
            return f"{holes} 是空洞，最大的 {largest}：够大，但不连续。"
        return f"{holes} are holes, the largest of {largest}: enough, and not in one piece."
    if owner == OTHERS:
        others = size(division.others_gib)
        return f"{name}占 {others}。" if chinese else f"Other processes and CUDA itself have {others}."
    owned = next((one for one in division.owners if one.owner == owner), None)
    if owned is None:
        return ""
    if owned is above_plan(division.owners):
        planned, is_now = size(owned.planned_gib), size(owned.gib)
        return (
            f"计划 {planned}，实际 {is_now}：{name}。"
            if chinese
            else f"Planned {planned}, is {is_now}: {name}."
        )
    share = f"{owned.gib / sum(one.gib for one in division.owners):.0%}"
    if chinese:
        return f"占用最多的是{name}：{size(owned.gib)}，为已用的 {share}。"
    return f"Most of what was in use are {name}: {size(owned.gib)}, {share}."


def _of_ranks(division: MemoryDivision, chinese: bool) -> str:
    held = size(sum(one.gib for one in division.owners))
    planned = size(sum(part.gib for part in division.planned))
    left, whole = size(division.free_gib), size(division.total_gib)
    if chinese:
        plan = f"计划 {planned}，" if division.planned else ""
        return f"{plan}各进程最多占用主机内存 {held}；最少时主机剩余 {left}，共 {whole}。"
    plan = f"Planned {planned}; the" if division.planned else "The"
    return f"{plan} ranks had up to {held} of the host's memory, and at least {left} of {whole} were left."


def size(gib: float | None) -> str:
    """A size of memory, with its unit."""
    gib = gib or 0.0
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"


def failure(division: MemoryDivision, chinese: bool) -> str:
    """What a snapshot says of the allocation that failed, and of the whole."""
    reserved, allocated = size(division.reserved_gib), size(division.allocated_gib)
    if chinese:
        state = f"PyTorch 已保留 {reserved}，已用 {allocated}"
        if division.requested_gib is None:
            return f"快照中没有失败的分配；{state}。"
        later = f"；快照晚于失败（其间有 {division.later} 次分配与释放）" if division.later else ""
        return f"GPU {division.device} 分配 {size(division.requested_gib)} 失败；{state}{later}。"
    state = f"PyTorch had reserved {reserved}, of which {allocated} were in use"
    if division.requested_gib is None:
        return f"No allocation failed in this snapshot of GPU {division.device}; {state}."
    later = (
        f"; {division.later} allocations and frees came between the failure and the snapshot, which shows what was left"
        if division.later
        else ""
    )
    return f"An allocation of {size(division.requested_gib)} on GPU {division.device} failed; {state}{later}."


def how_to_record(has_stacks: bool, chinese: bool) -> str:
    """How to get a snapshot that says more; empty where this one has all."""
    if has_stacks:
        return ""
    call = "torch.cuda.memory._record_memory_history(max_entries=100000)"
    return (
        f"快照没有调用栈：在分配之前调用 {call}。"
        if chinese
        else f"The snapshot has no stacks: call {call} before anything is allocated."
    )


def remedy(division: MemoryDivision, chinese: bool) -> str:
    """What gives the deciding owner's memory back; empty where nothing is known."""
    owner = suspect(division)
    if owner not in REMEDIES:
        return ""
    text = REMEDIES[owner][chinese]
    if owner in (HOLES, OTHERS):
        return f"{text}。" if chinese else f"Take {text}."
    name = _name(owner, chinese)
    return f"{name}：{text}。" if chinese else f"Less for {name}: {text}."


def _name(owner: str, chinese: bool) -> str:
    return CHINESE.get(owner, owner) if chinese else owner


def rows(division: MemoryDivision, chinese: bool) -> list[str]:
    """A line for each owner, the largest first, with what was planned and its parts; then what nobody had in use."""
    words = ("计划", "最大", "空闲", "共") if chinese else ("planned", "the largest", "free", "of")
    plan, largest, free, of = words
    lines = []
    whole = sum(one.gib for one in division.owners)
    for one in division.owners[:MOST_OWNERS]:
        if one.gib < SHOWN * whole and one.planned_gib is None:
            continue
        planned = "" if one.planned_gib is None else f", {plan} {size(one.planned_gib)}"
        parts = "; ".join(f"{part.name} {size(part.gib)}" for part in one.parts[:3])
        lines.append(
            f"{_name(one.owner, chinese)} {size(one.gib)}{planned}" + (f" ({parts})" if parts else "")
        )
    if division.planned:
        terms = "; ".join(f"{part.name} {size(part.gib)}" for part in division.planned[:4])
        lines.append(f"{plan} {size(sum(part.gib for part in division.planned))} ({terms})")
    if division.holes_gib is not None:
        holes = f"{_name(HOLES, chinese)} {size(division.holes_gib)}"
        lines.append(f"{holes}, {largest} {size(division.largest_hole_gib)}")
    if division.others_gib is not None:
        lines.append(f"{_name(OTHERS, chinese)} {size(division.others_gib)}")
    if division.free_gib is not None:
        total = "" if division.total_gib is None else f" {of} {size(division.total_gib)}"
        lines.append(f"{free} {size(division.free_gib)}{total}")
    return lines
