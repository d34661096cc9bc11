"""Values that depend on others: on the method, on the devices, on the reference recipe. Each with its reason.

Each function is a source of values: what is known so far -> a `Layer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from dsrun.ds_config import section
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import entries, flag_of
from dsrun.options.layers import NOTHING, Layer, Resolved, Source
from dsrun.options.optimizers import MUON, TYPES
from dsrun.options.table import ANSWERED_AT_ONCE, CONFIG, FULL, MICRO_BATCH_MEAN, StepOptions
from dsrun.words import counted, value_text

S = TypeVar("S", bound=StepOptions)
LR_BY_METHOD = {
    # Of QLoRA's paper up to 13B (arXiv:2305.14314, B.2), and of LoRA's for GPT-2 and GPT-3 (arXiv:2106.09685, D).
    "lora": 2e-4,
    "qlora": 2e-4,
    # ChatGLM2's ptuning/train.sh.
    "ptuning": 2e-2,
}
LARGE = 1e9
LR_OF_LARGE = 1e-5
"""Default from LARGE weights on: with a small model's learning rate a full fine-tune forgets. Published rates are near:
Llama 2's chat models 2e-5 (arXiv:2307.09288, 3.1), Qwen2.5's 7e-6 falling to 7e-7 (arXiv:2412.15115, 4.1)."""
RECIPE: dict[str, Any] = {
    "max_source_length": 64,
    "max_target_length": 64,
    "micro_batch": 4,
    "grad_accum": 1,
    "grad_clip": 0.0,
    "lr": 1e-4,
    "lr_schedule": "linear",
    "warmup_steps": 0,
    "loss": MICRO_BATCH_MEAN,
    "max_steps": 5000,
    "seed": 42,
    "save_steps": 1000,
    "activation_checkpointing": FULL,
    "packing": False,
    "train_on_prompt": False,
}
"""Values of ChatGLM2's ptuning/ds_train_finetune.sh, and the Trainer's defaults where that is silent."""
RECIPE_PTUNING: dict[str, Any] = {
    **RECIPE,
    "max_target_length": 128,
    "micro_batch": 1,
    "grad_accum": 16,
    # It trains without DeepSpeed, whose config lacks clipping: the Trainer's max_grad_norm, 1.0, counts.
    "grad_clip": 1.0,
    "lr": 2e-2,
    "max_steps": 3000,
}
"""Values of ChatGLM2's ptuning/train.sh: P-Tuning on one device. Its 4-bit weights are not repeated."""
FIXED = ("grad_clip", "lr_schedule", "warmup_steps", "loss", "packing", "train_on_prompt")
"""Options that make the recipe what it is. The others (lengths, batch, learning rate, how long) are arguments of its
script, which its user may choose."""


def of_model_file(defaults: Mapping[str, object], method: str) -> dict[str, object]:
    """A model file's defaults for a method. Its learning rate is a full fine-tune's unless it names the method, too."""
    other = method in LR_BY_METHOD and defaults.get("method", "full") != method
    return {name: value for name, value in defaults.items() if not (other and name == "lr")}


def by_model_file(known: Resolved[FinetuneOptions], defaults: Mapping[str, Any], where: str) -> Layer:
    """The layer of a model file's defaults for the method that is trained. where: the file."""
    method = known.filled(Source.MODEL_FILE, {"method": defaults.get("method")}, where).options.method
    return Layer(Source.MODEL_FILE, of_model_file(defaults, method), where)


def by_method(known: Resolved[FinetuneOptions]) -> Layer:
    """The method's learning rate, as a default: adapters start from nothing and take larger steps."""
    method = known.options.method
    lr = LR_BY_METHOD.get(method)
    return Layer(Source.DERIVED, {"lr": lr}, f"--method {method}")


def by_size(known: Resolved[FinetuneOptions], weights: float | None) -> Layer:
    """The learning rate of a large model that is trained whole. weights: how many it has; None where it isn't known."""
    if known.options.method != "full" or weights is None or weights < LARGE:
        return NOTHING
    return Layer(Source.DERIVED, {"lr": LR_OF_LARGE}, f"{weights:.2g} weights")


def by_devices(known: Resolved[S], ranks: int, *, fixed_micro_batch: bool = False) -> Layer:
    """The split of an optimizer step over devices: micro batch x accumulation x ranks.

    The examples of a step (--global-batch) stay, whatever the devices. A micro batch by default is the largest that
    divides a device's share, up to that default. A given accumulation describes the step by its parts: the global batch
    is then the product, unless that is given, too.

    fixed_micro_batch: the default micro batch stays, too, as the loss depends on it.

    Raises DsrunError, with the nearest number that fits, where the step can't be divided like that.
    """
    # In the order of what a user can mean. An accumulation stronger than the batch decides the batch. Else the batch is
    # given: first it has to divide by the ranks, then each rank's share by a given accumulation, and only what is left
    # is the micro batch's, which may shrink where it is a default and must fit where it was given.
    options = known.options
    step, micro, accumulation = (known.source(name) for name in ("global_batch", "micro_batch", "grad_accum"))
    if options.grad_accum is not None and accumulation > step:
        product = options.micro_batch * options.grad_accum * ranks
        return Layer.settled({"global_batch": product}, "micro batch x accumulation x devices")
    if options.grad_accum is not None and accumulation == micro == step == Source.LAB_PRESET:
        product = options.micro_batch * options.grad_accum * ranks
        if product != options.global_batch:  # a DeepSpeed config with all three
            parts = f"micro batch {options.micro_batch} x accumulation {options.grad_accum} x {counted(ranks, 'rank')}"
            message = f"{options.global_batch} examples a step are not {parts}"
            raise _indivisible(known, "global_batch", message, product)
    share, left = divmod(options.global_batch, ranks)
    if left:
        lower, upper = share * ranks, (share + 1) * ranks
        message = f"{options.global_batch} examples a step can't be shared equally by {ranks} ranks"
        raise _indivisible(known, "global_batch", message, lower if lower and left <= ranks - left else upper)
    fixed = options.grad_accum if accumulation == step else None
    if fixed is not None and share % fixed:
        message = f"{fixed} micro-steps can't take {share} examples a device"
        raise _indivisible(known, "grad_accum", message, nearest_divisor(fixed, share))
    most = share // fixed if fixed else min(options.micro_batch, share)
    size = next(size for size in range(most, 0, -1) if share % size == 0)
    if (fixed_micro_batch or micro >= max(step, Source.LAB_PRESET)) and size != options.micro_batch:
        message = f"micro batches of {options.micro_batch} don't add up to {share} examples a device"
        nearest = most if fixed else nearest_divisor(options.micro_batch, share)
        raise _indivisible(known, "micro_batch", message, nearest)
    why = f"{options.global_batch} examples a step over {ranks} ranks"
    return Layer.settled({"micro_batch": size, "grad_accum": share // size}, why)


MICRO_TOKENS = 16384
"""Tokens of a micro batch, at most: a GPU's matrix units are full long before."""
BY_TOKENS = ("global_batch", "micro_batch", "grad_accum")
"""Options that describe a step in examples; --tokens-per-batch works them out."""
BY_LAYOUT = ("preset", "tp", "sp", "pp", "ep", "micro_batch", "grad_accum")
"""Options that --layout auto works out, and that may not be given beside it."""


def by_tokens(known: Resolved[S], tokens: int, longest: int, ranks: int) -> Layer:
    """The split of a step of `tokens` tokens over ranks, by micro batches of whole examples of the longest kind.

    longest: tokens of the longest example that there may be. A micro batch holds `micro_batch` times as many tokens.
    How many micro batches a step really has follows from its examples; grad_accum is the number to plan with.

    Raises DsrunError where the step is given in examples, too, or is shorter than an example.
    """
    if given := [name for name in BY_TOKENS if known.source(name) >= Source.LAB_PRESET]:
        message = f"a step of {tokens} tokens has no fixed {given[0].replace('_', ' ')}"
        hint = "Leave one of the two out: --tokens-per-batch decides it."
        raise DsrunError(message, where=str(known.origins[given[0]]), hint=hint)
    if tokens < longest:
        message = f"a step of {tokens} tokens has no room for an example of {longest}"
        hint = (
            f"At least --tokens-per-batch {longest}, or shorter --max-source-length and --max-target-length."
        )
        raise DsrunError(message, where=str(known.origins["tokens_per_batch"]), hint=hint)
    return _of_tokens(tokens, longest, ranks, min(tokens // (ranks * longest), MICRO_TOKENS // longest))


def _of_tokens(tokens: int, longest: int, ranks: int, micro_batch: int) -> Layer:
    micro_batch = max(1, micro_batch)
    grad_accum = accumulation(tokens, longest, ranks, micro_batch)
    split = {
        "micro_batch": micro_batch, "grad_accum": grad_accum, "global_batch": micro_batch * grad_accum * ranks
    }  # fmt: skip
    return Layer.settled(split, f"{tokens} tokens a step over {ranks} ranks")


def accumulation(tokens: int, longest: int, ranks: int, micro_batch: int) -> int:
    """The micro-steps that hold a step of `tokens` tokens; two at least.

    DeepSpeed makes room to accumulate gradients in only where the config has more than one (stage_1_and_2.py,
    get_offload_gradient_dict).
    """
    return max(2, -(-tokens // (ranks * longest * micro_batch)))


def smaller_token_batches(
    known: Resolved[FinetuneOptions], tokens: int, longest: int, ranks: int
) -> Iterator[Layer]:
    """Smaller and smaller micro batches for a step that `by_tokens` has divided: for where memory is short."""
    for size in range(known.options.micro_batch - 1, 0, -1):
        yield _of_tokens(tokens, longest, ranks, size)


def smaller_micro_batches(known: Resolved[FinetuneOptions], ranks: int) -> Iterator[Layer]:
    """Smaller and smaller micro batches, of which a step has more, for a step that `by_devices` has divided: for where
    memory is short. There are none where the micro batch or the accumulation is given, or where the loss depends on it.
    """
    return _other_micro_batches(known, ranks, range(known.options.micro_batch - 1, 0, -1))


def larger_micro_batches(known: Resolved[FinetuneOptions], ranks: int) -> Iterator[Layer]:
    """Larger and larger micro batches, of which a step has fewer: for where memory has room. None where
    `smaller_micro_batches` has none."""
    share = known.options.global_batch // ranks
    return _other_micro_batches(known, ranks, range(known.options.micro_batch + 1, min(share, MOST_ROWS) + 1))


MOST_ROWS = 256
"""Examples of a micro batch, at most, that is chosen for a user."""


def _other_micro_batches(
    known: Resolved[FinetuneOptions], ranks: int, sizes: Iterable[int]
) -> Iterator[Layer]:
    strongest = max(known.source(name) for name in ("micro_batch", "grad_accum"))
    if strongest >= Source.LAB_PRESET or known.options.loss == MICRO_BATCH_MEAN:
        return
    share = known.options.global_batch // ranks
    for size in sizes:
        if share % size == 0:
            split = {"micro_batch": size, "grad_accum": share // size}
            yield Layer.settled(split, "what memory has room for")


def nearest_divisor(wanted: int, share: int) -> int:
    """The divisor of `share` that is nearest to `wanted`."""
    divisors = (size for size in range(1, share + 1) if share % size == 0)
    return min(divisors, key=lambda size: abs(size - wanted))


def _indivisible(known: Resolved[S], name: str, message: str, nearest: int) -> DsrunError:
    hint = f"The nearest that fits: {flag_of(FinetuneOptions, name)} {nearest}."
    return DsrunError(message, where=str(known.origins[name]), hint=hint)


IN_STAGES: dict[str, Any] = {
    # ZeRO-2 and 3 divide gradients that a stage has to sum (DeepSpeed, runtime/pipe/engine.py), and without ZeRO it
    # clips by the norm of one stage.
    "preset": "zero1",
    # Only hidden states go from stage to stage: no positions, no mask, no keys and values of earlier tokens.
    "packing": False,
    "attention": "sdpa",
    "liger": False,
    "tile_tokens": 0,
    "generate_rows": 0,
    "score_before": False,
    "compute_metrics": False,
}
"""Values that --pp needs, as defaults; other values that are given are refused."""
LEFT_OUT = {
    "packing": "no packing",
    "generate_rows": "held-out prompts are not answered (dsrun evaluate RUN does so)",
}


def by_pipeline(known: Resolved[FinetuneOptions]) -> Layer:
    """The defaults that --pp changes; the layer's note says which."""
    if known.options.pp == 1:
        return NOTHING
    defaults = {name: value for name, value in IN_STAGES.items() if known.source(name) < Source.LAB_PRESET}
    changed = {name for name, value in defaults.items() if getattr(known.options, name) != value}
    words = [phrase for name, phrase in LEFT_OUT.items() if name in changed]
    if "preset" in changed:
        words.insert(0, f"preset {defaults['preset']}")
    option = f"--pp {known.options.pp}"
    return Layer.settled(defaults, option, f"{option}: {', '.join(words)}" if words else "")


def by_partitions(known: Resolved[FinetuneOptions], ranks: int) -> Layer:
    """The default number of held-out prompts where weights don't fit a GPU whole: as many as all ranks answer at once.

    Each token gathers all weights then; `dsrun evaluate` answers more prompts with the export.
    """
    options = known.options
    at_once = ranks * options.micro_batch * ANSWERED_AT_ONCE
    if known.source("generate_rows") >= Source.LAB_PRESET or options.generate_rows <= at_once:
        return NOTHING
    return Layer.settled({"generate_rows": at_once}, "weights that don't fit a GPU whole")


TILE_TOKENS = 4096
"""Tokens of a tile. With a vocabulary of 128,000 they have 2 GiB of logits in float32, and keep a GPU busy."""
LARGE_LOGITS = 4 << 30
"""Bytes of an example's logits in float32 from which on tiles are worth it: the loss takes three times as much."""


def tile_tokens(given: int | None, tokens: int, vocabulary: int) -> int:
    """The value of --tile-tokens. given: the option, or None. tokens: of the longest example's share on a rank."""
    if given is not None:
        return given
    return TILE_TOKENS if 4 * tokens * vocabulary >= LARGE_LOGITS else 0


def by_loss(known: Resolved[FinetuneOptions]) -> Layer:
    """No packing for a mean of micro batches' means: packing decides by lengths which examples share a micro batch.

    Raises DsrunError where packing is given.
    """
    if known.options.loss != MICRO_BATCH_MEAN:
        return NOTHING
    if known.options.tokens_per_batch is not None:
        message = f"a budget of tokens decides what shares a micro batch, and --loss {MICRO_BATCH_MEAN} depends on that"
        hint = "Leave one of the two out (--official has that loss)."
        raise DsrunError(message, where=str(known.origins["tokens_per_batch"]), hint=hint)
    if known.source("packing") > Source.DERIVED and known.options.packing:
        message = f"examples can't be packed for --loss {MICRO_BATCH_MEAN}: each micro batch counts by itself"
        hint = "Leave one of the two out; a mean over tokens doesn't depend on packing."
        raise DsrunError(message, where=str(known.origins["packing"]), hint=hint)
    return Layer(Source.DERIVED, {"packing": False}, f"--loss {MICRO_BATCH_MEAN}")


def by_recipe(known: Resolved[FinetuneOptions]) -> Layer:
    """The layer of --official: ChatGLM2's own numbers in place of every default.

    Raises DsrunError where a given value contradicts one that makes the recipe what it is.
    """
    options = known.options
    if not options.official:
        return NOTHING
    recipe = RECIPE_PTUNING if options.method == "ptuning" else RECIPE
    if options.method in ("lora", "qlora"):  # ChatGLM2's script has neither: their own learning rate stays
        recipe = {name: value for name, value in recipe.items() if name != "lr"}
    declared = entries(FinetuneOptions)
    problems = [
        Problem(
            f"{declared[name].flag} is {value_text(getattr(options, name))}, and --official, ChatGLM2's own recipe, "
            f"has {value_text(recipe[name])}",
            str(known.origins[name]),
            "Leave one of the two out.",
        )
        for name in FIXED
        if known.source(name) > Source.REFERENCE_RECIPE and getattr(options, name) != recipe[name]
    ]
    raise_all(problems)
    return Layer(Source.REFERENCE_RECIPE, recipe, "--official")


def halves(max_length: int) -> dict[str, object]:
    """The two limits of examples whose prompt and response share one: each may take what the other leaves."""
    target = max_length // 2
    return {"max_source_length": max_length - target, "max_target_length": target}


def by_max_length(known: Resolved[FinetuneOptions]) -> Layer:
    """The layer of --max-length: both limits, halves of it. A limit for one of the two by a stronger source wins.

    Raises DsrunError where the same source gives both.
    """
    options = known.options
    if options.max_length is None:
        return NOTHING
    own, flag = known.source("max_length"), flag_of(FinetuneOptions, "max_length")
    strongest = max(("max_source_length", "max_target_length"), key=known.source)
    if options.official and known.source(strongest) <= own:
        raise DsrunError(
            "--official has a limit for prompts and one for responses", where=flag, hint="Leave one out."
        )
    if known.source(strongest) == own >= Source.RUN_FILE:
        raise DsrunError(
            f"and {flag_of(FinetuneOptions, strongest)} limit the same tokens",
            where=flag,
            hint="Give one of them.",
        )
    if known.source(strongest) > own:
        return Layer.settled({"max_length": None}, str(known.origins[strongest]))
    return Layer.settled(halves(options.max_length), f"{flag} {options.max_length}, for both")


RATES = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "LRRangeTest": "lr_range_test_min_lr",
}
"""A schedule of DeepSpeed's -> its argument that replaces the optimizer's learning rate (runtime/lr_schedules.py)."""


def by_optimizer(known: Resolved[FinetuneOptions]) -> Layer:
    """No clipping for Muon: under ZeRO DeepSpeed clips Muon's update in place of the gradient (stage_1_and_2.py), and
    the norm of one says nothing about the other's.
    """
    clip = 0.0 if known.options.optimizer == MUON else None
    return Layer(Source.DERIVED, {"grad_clip": clip}, "--optimizer muon")


def step_of(ds_config: Mapping[str, Any]) -> dict[str, object]:
    """The options in a preset's config: batch, clipping, learning rate and schedule, optimizer, precision.

    "auto" is no value.
    """
    optimizer, scheduler = section(ds_config, "optimizer"), section(ds_config, "scheduler")
    kind, rate = optimizer.get("type"), scheduled_rate(ds_config)
    values: dict[str, object] = {
        "global_batch": ds_config.get("train_batch_size"),
        "micro_batch": ds_config.get("train_micro_batch_size_per_gpu"),
        "grad_accum": ds_config.get("gradient_accumulation_steps"),
        "grad_clip": ds_config.get("gradient_clipping"),
        "lr": section(optimizer, "params").get("lr") if rate is None else rate[1],
        "lr_schedule": CONFIG if scheduler.get("type") else None,
        "optimizer": TYPES.get(kind.lower(), CONFIG) if isinstance(kind, str) else None,
        "precision": precision_of(ds_config),
    }
    return {name: value for name, value in values.items() if value not in (None, "auto")}


def scheduled_rate(ds_config: Mapping[str, Any]) -> tuple[str, float] | None:
    """The argument of a config's scheduler that replaces the optimizer's learning rate, and its value."""
    scheduler = section(ds_config, "scheduler")
    argument = RATES.get(str(scheduler.get("type")))
    rate = section(scheduler, "params").get(argument) if argument else None
    return (str(argument), rate) if isinstance(rate, (int, float)) else None


def precision_of(ds_config: Mapping[str, Any]) -> str | None:
    """The precision that a config's fp16 and bf16 sections switch on, or None where they leave it open."""
    switches = {name: section(ds_config, name).get("enabled") for name in ("bf16", "fp16")}
    on = next((name for name, switch in switches.items() if switch is True), None)
    return on or ("fp32" if all(switch is False for switch in switches.values()) else None)


def built_in_step() -> dict[str, object]:
    """A config's values for a step where neither the preset nor the user has any."""
    options = FinetuneOptions()
    return {
        "micro_batch": options.micro_batch, "grad_accum": 1, "grad_clip": options.grad_clip, "lr": options.lr,
    }  # fmt: skip
