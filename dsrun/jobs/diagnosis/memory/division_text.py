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

HOLES, OTHERS = "holes", "other processes"
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
        "fewer or shorter answers at once, a smaller share for the cache (vLLM: gpu_memory_utilization, max_model_len), "
        "or use_cache=False while training",
        "减少同时生成的条数或长度，减小缓存的份额（vLLM：gpu_memory_utilization、max_model_len），训练时 use_cache=False",
    ),
    OUTPUTS: (
        "outputs of an evaluation moved to the host more often (eval_accumulation_steps), or only what the metric needs "
        "(preprocess_logits_for_metrics, prediction_loss_only)",
        "更常把评估的输出移到主机（eval_accumulation_steps），或只保留指标所需（preprocess_logits_for_metrics、"
        "prediction_loss_only）",
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
MOST_OWNERS = 8


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
    """The owner that decided, in a sentence; empty where nothing is known."""
    owner = suspect(division)
    name, where = _name(owner, chinese), _where(division, chinese)
    if owner == HOLES:
        size, largest = division.holes_gib or 0.0, division.largest_hole_gib or 0.0
        if chinese:
            return f"{size:.2f} GiB 是空洞，最大的 {largest:.2f} GiB：够大，但不连续。"
        return f"{size:.2f} GiB are holes, the largest of {largest:.2f} GiB: enough, and not in one piece."
    if owner == OTHERS:
        size = division.others_gib or 0.0
        return (
            f"{name}占 {size:.1f} GiB。"
            if chinese
            else f"Other processes and CUDA itself have {size:.1f} GiB."
        )
    owned = next((one for one in division.owners if one.owner == owner), None)
    if owned is None:
        return ""
    planned = owned.planned_gib
    if planned is not None and above_plan(division.owners) is owned:
        if chinese:
            return f"计划 {planned:.2f} GiB，实际 {owned.gib:.2f} GiB：{name}{where}。"
        return f"Planned {planned:.2f} GiB, is {owned.gib:.2f}: {name}{where}."
    whole = sum(one.gib for one in division.owners)
    share = f"{owned.gib / whole:.0%}" if whole else ""
    if chinese:
        return f"占用最多的是{name}：{owned.gib:.2f} GiB，为已用的 {share}{where}。"
    return f"Most of what was in use are {name}: {owned.gib:.2f} GiB, {share}{where}."


def failure(division: MemoryDivision, chinese: bool) -> str:
    """What a snapshot says of the allocation that failed, and of the whole."""
    reserved, allocated = division.reserved_gib or 0.0, division.allocated_gib or 0.0
    if chinese:
        state = f"PyTorch 已保留 {reserved:.2f} GiB，已用 {allocated:.2f} GiB"
        if division.requested_gib is None:
            return f"快照中没有失败的分配；{state}。"
        later = f"；快照晚于失败（其间有 {division.later} 次分配与释放）" if division.later else ""
        return f"GPU {division.device} 分配 {division.requested_gib:.2f} GiB 失败；{state}{later}。"
    state = f"PyTorch had reserved {reserved:.2f} GiB, of which {allocated:.2f} GiB were in use"
    if division.requested_gib is None:
        return f"No allocation failed in this snapshot of GPU {division.device}; {state}."
    later = (
        f"; {division.later} allocations and frees came between the failure and the snapshot, which shows what was left"
        if division.later
        else ""
    )
    return (
        f"An allocation of {division.requested_gib:.2f} GiB on GPU {division.device} failed; {state}{later}."
    )


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


def _where(division: MemoryDivision, chinese: bool) -> str:
    """What the job was doing, in brackets; empty where that isn't known."""
    facts = [fact for fact in (division.when, division.failed_in) if fact]
    return (f"（{'，'.join(facts)}）" if chinese else f" ({', in '.join(facts)})") if facts else ""


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
    lines = []
    for one in division.owners[:MOST_OWNERS]:
        planned = "" if one.planned_gib is None else (
            f"，计划 {one.planned_gib:.2f}" if chinese else f", planned {one.planned_gib:.2f}"
        )  # fmt: skip
        parts = "; ".join(f"{part.name} {part.gib:.2f}" for part in one.parts[:3])
        lines.append(
            f"{_name(one.owner, chinese)} {one.gib:.2f} GiB{planned}" + (f" ({parts})" if parts else "")
        )
    if division.planned:
        terms = "; ".join(f"{part.name} {part.gib:.2f}" for part in division.planned[:4])
        whole = sum(part.gib for part in division.planned)
        lines.append(f"计划 {whole:.2f} GiB（{terms}）" if chinese else f"planned {whole:.2f} GiB ({terms})")
    if division.holes_gib is not None:
        largest = division.largest_hole_gib or 0.0
        holes = f"{division.holes_gib:.2f} GiB"
        lines.append(
            f"空洞 {holes}，最大 {largest:.2f}" if chinese else f"holes {holes}, the largest {largest:.2f}"
        )
    if division.others_gib is not None:
        lines.append(f"{_name(OTHERS, chinese)} {division.others_gib:.2f} GiB" if chinese else
                     f"other processes and CUDA itself {division.others_gib:.2f} GiB")  # fmt: skip
    if division.free_gib is not None:
        free = f"{division.free_gib:.2f}"
        of = "" if division.total_gib is None else (
            f"，共 {division.total_gib:.2f}" if chinese else f" of {division.total_gib:.2f}"
        )  # fmt: skip
        lines.append(f"空闲 {free} GiB{of}" if chinese else f"free {free} GiB{of}")
    return lines
