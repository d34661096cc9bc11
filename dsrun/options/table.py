"""Every option, once: groups of fields that the commands are put together from (commands.py).

A field's default is what holds where nobody says anything; derived.py has those that depend on other options, on the
model or on the devices. A new option of fine-tuning is a field here, and the place that uses it.
"""

from pathlib import Path
from typing import Any

from dsrun.options.declare import LIST_OR_FILE, NAME_OR_PATH, PATH, OptionGroup, again, option
from dsrun.options.optimizers import OPTIMIZERS

MOST_RANKS = 1 << 16
"""Ranks that may divide one model: more is a slip of the finger."""
PRECISIONS = ("fp16", "bf16", "fp32")
METHODS = ("full", "lora", "qlora", "ptuning")
NO_RECOMPUTING, FULL, SELECTIVE, OFFLOADED = RECOMPUTING = ("none", "full", "selective", "offload")
"""Values of --activation-checkpointing: the layers whose activations backward computes again."""
ATTENTIONS = ("auto", "sdpa", "flash", "varlen", "eager")
NO_FP8, *_ = FP8_WAYS = ("none", "rowwise", "tensorwise")
"""Values of --fp8: torchao's recipes, by what shares a scale."""
CONFIG = "config"
"""The value that leaves a setting to its section of the DeepSpeed config."""
MICRO_BATCH_MEAN = "micro-batch-mean"
"""The loss for which it matters which examples share a micro batch."""
LR_SCHEDULES = ("linear", "cosine", "constant", CONFIG)
AUTO_METRICS, TEXT_METRICS, CLASS_METRICS = METRICS = ("auto", "text", "classification")
NO_EXPORT = "none"
"""The value that leaves the model unwritten: a run that measures, or one whose model `dsrun export` writes later."""
TEXT_FORMAT = "text"
"""The export format that writes the text model of a checkpoint with more than text by itself, too."""
WRITTEN_FORMATS = ("transformers", "chatglm", TEXT_FORMAT, "adapter")
EXPORT_FORMATS = (*WRITTEN_FORMATS, NO_EXPORT)
TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")
"""Each is the name of its package, too, and of a module in dsrun/training/reports/trackers."""
FORMS = ("deepspeed", "accelerate", "fsdp")
TARGETS = ("deepspeed", "hf", "accelerate")


def recomputing(every: int) -> dict[str, Any]:
    """The options by which backward computes one layer in `every` again; 0: none."""
    way = {0: NO_RECOMPUTING, 1: FULL}.get(every, SELECTIVE)
    return {"activation_checkpointing": way, **({"recompute_every": every} if way == SELECTIVE else {})}


class ModelOptions(OptionGroup):
    """Model."""

    model_path: Path | None = option(None, "Folder or GGUF file with a named model's weights.", common=True)


AUTO_LAYOUT = "auto"
LAYOUTS = ("as said", AUTO_LAYOUT)


class StrategyOptions(OptionGroup):
    """Model.

    How it is divided over devices.
    """

    preset: str = option(
        "zero2", "A preset, its file, ds.json, or auto: the fastest.",
        flags=("--preset", "--deepspeed"), default_text="the model's; on GPUs auto", common=True, path=NAME_OR_PATH,
    )  # fmt: skip
    layout: str = option(
        "as said", "auto: choose --preset, --tp, --sp and the micro batch, the fastest that fits (GPUs).",
        choices=LAYOUTS,
    )  # fmt: skip


class ParallelismOptions(OptionGroup):
    """Parallelism.

    Ranks that work on the same examples. What is left of them after that is data parallel: each such group has its own
    share of a step's examples. The ranks of a group are neighbours. With --ep each rank has examples of its own.
    """

    tp: int = option(
        1, "Tensor parallelism: ranks that divide every layer.", at_least=1, at_most=MOST_RANKS, common=True
    )
    sp: int = option(
        1, "Sequence parallelism: ranks that divide every sequence.", at_least=1, at_most=MOST_RANKS
    )

    pp: int = option(
        1,
        "Pipeline parallelism: the layers in as many stages, each on other ranks.",
        at_least=1,
        at_most=MOST_RANKS,
    )
    ep: int = option(
        1,
        "Expert parallelism: ranks that divide the experts of every layer, each with examples of its own.",
        at_least=1,
        at_most=MOST_RANKS,
    )

    @property
    def group(self) -> int:
        """Ranks that work on the same examples."""
        return self.tp * self.sp * self.pp

    @property
    def alone(self) -> bool:
        """Whether ranks are data parallel in everything: each has examples of its own, and all weights or ZeRO's
        share of them."""
        return self.group * self.ep == 1

    @property
    def words(self) -> str:
        """The options as given: "--tp 2"; empty where every rank has examples of its own."""
        sizes = {"--tp": self.tp, "--sp": self.sp, "--pp": self.pp, "--ep": self.ep}
        return " ".join(f"{option} {size}" for option, size in sizes.items() if size > 1)


class PrecisionOptions(OptionGroup):
    """Model."""

    precision: str | None = option(
        None, "Of weights and activations.", choices=PRECISIONS, default_text="what the devices do best", common=True
    )  # fmt: skip


class OverrideOptions(OptionGroup):
    """Memory and speed.

    Keys of the DeepSpeed config.
    """

    nvme_path: str | None = option(
        None, "Folder on a local NVMe disk, for presets that offload to it.", metavar="DIR",
        variable="DSRUN_NVME_PATH", path=PATH,
    )  # fmt: skip
    overrides: tuple[str, ...] = option(
        (), "Set a key of the DeepSpeed config.", flags=("--set",), metavar="PATH=VALUE", common=True
    )


class TrainingFileOptions(OptionGroup):
    """Data.

    The training files.
    """

    train_file: tuple[str, ...] = option(
        (), "JSONL, JSON, CSV, Parquet, text or hf:OWNER/NAME. Repeatable; FILE:2 takes each example twice an epoch.",
        metavar="FILE[:WEIGHT]", default_text="the model's", common=True, path=PATH,
    )  # fmt: skip


class RowOptions(OptionGroup):
    """Data.

    Which of the rows are trained on.
    """

    val_size: float | None = option(
        None, "Hold rows out of the training files, for loss and scores: a share (0.1), or how many.", above=0,
        default_text="none",
    )  # fmt: skip
    max_samples: int | None = option(
        None, "Only the first N rows of each training file.", at_least=1, metavar="N", default_text="all"
    )


class EvalFileOptions(OptionGroup):
    """Data.

    The held-out file.
    """

    eval_file: Path | None = option(None, "Held-out examples, for loss and scores.", common=True)


class FormatOptions(OptionGroup):
    """Data.

    What a row of a file is.
    """

    prompt_column: str = option("content", "Column of the prompt.", common=True)
    response_column: str = option("summary", "Column of the response.", common=True)
    history_column: str = option("history", "Column of earlier turns, where there is one.")
    text_column: str = option(
        "text", "Column of plain text, to train on every token of it: continued pre-training."
    )
    data_format: str = option(
        "auto",
        "What a row is.",
        choices=("auto",),
        choices_in="dsrun.data.conversations:FORMATS",
        default_text="auto, by the file's columns",
    )


class LengthOptions(OptionGroup):
    """Data.

    Tokens.
    """

    max_length: int | None = option(
        None,
        "Longest example in tokens, prompt and response together.",
        at_least=2,
        default_text="99 % fit",
    )
    max_source_length: int = option(
        512, "Longest prompt in tokens, in place of --max-length.", at_least=1, default_text="99 % fit"
    )
    max_target_length: int = option(
        512, "Longest response in tokens, in place of --max-length.", at_least=1, default_text="99 % fit"
    )

    @property
    def longest_example(self) -> int:
        """Tokens of an example, at most."""
        return self.max_length or self.max_source_length + self.max_target_length


class TokenizerOptions(OptionGroup):
    """Data.

    What the model's tokenizer gets.
    """

    chat_template: Path | None = option(
        None, "Frame prompts by this chat template (Jinja), and export it.", metavar="FILE", default_text="the model's"
    )  # fmt: skip
    add_special_tokens: tuple[str, ...] = option(
        (), 'New tokens: "<a>,<b>", or a .txt file with one a line. Embeddings grow with them.', metavar="TOKENS",
        path=LIST_OR_FILE,
    )  # fmt: skip


class TemplateOptions(OptionGroup):
    """Data.

    What the chat template is told.
    """

    thinking: str = option(
        "auto", "Prompts that ask for thoughts: as each answer has some or not, or always, or never.",
        choices=("auto", "on", "off"),
    )  # fmt: skip
    template_arg: tuple[str, ...] = option(
        (), "Give the chat template a variable: enable_thinking=false. Repeatable.", metavar="NAME=VALUE"
    )


class EncodingOptions(OptionGroup):
    """Data.

    How examples become tokens.
    """

    train_on_prompt: bool = option(False, "Train on prompts as on responses.")
    strict_data: bool = option(False, "Stop where an example would be left out.")
    allow_truncation: bool = option(False, "Train on what is left of many examples that are too long.")
    allow_bad_rows: bool = option(
        False, "Train on what is left of files of which many rows can't be trained on."
    )
    official: bool = option(False, "ChatGLM2's own recipe, number for number; slower.")


class BatchOptions(OptionGroup):
    """Training.

    How many examples a step takes.
    """

    micro_batch: int = option(
        4, "Examples per device and micro-step.", at_least=1, default_text="up to 4", common=True
    )
    grad_accum: int | None = option(
        None, "Micro-steps per optimizer step.", at_least=1, default_text="what the global batch needs"
    )

    @property
    def micro_steps(self) -> int:
        """The given number, or 1."""
        return self.grad_accum or 1


class StepOptions(BatchOptions):
    """Training.

    One optimizer step.
    """

    global_batch: int = option(
        16, "Examples of an optimizer step, over all devices.", at_least=1,
        default_text="the model's, else 16", common=True,
    )  # fmt: skip
    grad_clip: float = option(1.0, "Gradient norm to clip at; 0: never.", at_least=0)


class TokenBatchOptions(OptionGroup):
    """Training.

    One optimizer step by its tokens.
    """

    tokens_per_batch: int | None = option(
        None, "Tokens of an optimizer step, in place of --global-batch: as many examples as fit, on any devices.",
        at_least=1,
    )  # fmt: skip


class OptimizerOptions(OptionGroup):
    """Training.

    The optimizer, and what it minimises.
    """

    lr: float = option(
        1e-4, "Learning rate.", above=0, common=True,
        default_text="the model's; 1e-4, from 1e9 weights on 1e-5; LoRA 2e-4, P-Tuning 2e-2",
    )  # fmt: skip
    optimizer: str = option(
        "adamw", "adamw-8bit: states of 2 bytes a weight, not 8 (bitsandbytes; GPUs). config: the config's section.",
        choices=(*OPTIMIZERS, CONFIG),
    )  # fmt: skip
    muon_lr: float | None = option(
        None, "Muon: learning rate of matrices; --lr is of the rest.", above=0,
        default_text="--lr x 0.2 x the root of the hidden size",
    )  # fmt: skip
    loss: str = option(
        "token-mean", "What a step's loss is the mean of: all its target tokens, or its micro batches' means.",
        choices_in="dsrun.training.loss:LOSSES",
    )  # fmt: skip


class OptimizerArguments(OptionGroup):
    """Training.

    Arguments of the optimizer beside the learning rate.
    """

    weight_decay: float | None = option(
        None, "The optimizer's weight decay.", at_least=0, default_text="the preset's, else 0"
    )
    adam_beta1: float | None = option(
        None,
        "AdamW's decay of the mean.",
        at_least=0,
        below=1,
        default_text="the preset's; 0.9 beside the other",
    )
    adam_beta2: float | None = option(
        None,
        "AdamW's decay of the variance.",
        at_least=0,
        below=1,
        default_text="the preset's; 0.999 beside the other",
    )
    adam_epsilon: float | None = option(
        None, "AdamW's addition to the root of the variance.", above=0, default_text="the preset's, else 1e-8"
    )
    momentum: float | None = option(
        None, "SGD's momentum, or Muon's.", at_least=0, below=1, default_text="0.9; Muon 0.95"
    )


class PeftOptions(OptionGroup):
    """LoRA, P-Tuning."""

    method: str = option("full", "What is trained.", choices=METHODS, common=True)
    # The rank is PEFT's default, and so is no dropout; alpha twice the rank is the field's habit.
    lora_rank: int = option(8, "Rank of LoRA's matrices.", at_least=1)
    lora_alpha: float = option(16.0, "LoRA's scale times its rank.", above=0)
    lora_dropout: float = option(0.0, "Dropout of LoRA's inputs.", at_least=0, below=1)
    lora_target: str = option(
        "all", "What gets LoRA's matrices, by name: q_proj,v_proj; experts: those of a mixture (all,experts).",
        metavar="NAMES", default_text="all linear layers, but the output's and routers", synonyms={"all-linear": "all"},
    )  # fmt: skip
    # ChatGLM2's ptuning/train.sh and, for the dropout, its prefix encoder.
    pre_seq_len: int = option(128, "Positions of P-Tuning's prefix.", at_least=1)
    prefix_dropout: float = option(0.1, "Dropout of P-Tuning's prefix.", at_least=0, below=1)
    adapter: str | None = option(
        None, "Start from this one: LoRA's folder, or a P-Tuning checkpoint.", metavar="PATH", path=PATH
    )

    @property
    def freezes(self) -> bool:
        """Whether the model's own weights stay as they are."""
        return self.method != "full"


class ScheduleOptions(OptionGroup):
    """Training.

    How long, and the learning rate on the way.
    """

    epochs: float | None = option(3.0, "Passes over the examples.", above=0, common=True)
    max_steps: int | None = option(None, "Optimizer steps, instead of epochs.", at_least=1, common=True)
    lr_schedule: str = option(
        "cosine", "Learning rate after the warm-up; config: the scheduler of a preset or of --set.",
        choices=LR_SCHEDULES,
    )  # fmt: skip
    warmup_ratio: float | None = option(
        0.03, "Share of the steps until the full learning rate.", at_least=0, below=1
    )
    warmup_steps: int | None = option(None, "As many steps, instead of a share.", at_least=0)
    seed: int = option(42, "Decides the order of the examples.")


class ComputeOptions(OptionGroup):
    """Memory and speed.

    How it is computed.
    """

    activation_checkpointing: str = option(
        "none", "Layers that backward computes again: all, one in --recompute-every, all from host memory.",
        choices=RECOMPUTING, default_text="the model's", common=True,
    )  # fmt: skip
    recompute_every: int = option(2, "Layers of which selective computes one again.", at_least=2)
    tile_tokens: int | None = option(
        None, "Tokens that the loss and each MLP take at a time; backward computes MLPs again. 0: all at once.",
        at_least=0, default_text="4096 where an example's logits are 4 GiB or more, else 0",
    )  # fmt: skip
    packing: bool = option(True, "Several examples in one packed sequence, kept apart.")
    attention: str = option(
        "auto", "How attention is computed.", choices=ATTENTIONS,
        default_text="auto: flash-attn where it is installed and works, torch's varlen kernel, else its SDPA",
    )  # fmt: skip
    liger: bool | None = option(
        None,
        "liger-kernel's loss, norms, positions and gated layers.",
        default_text="where GPU and model have it",
    )
    fp8: str = option(
        NO_FP8,
        "Multiply linear layers in fp8, with a scale for each row or for a tensor: FSDP, GPUs from Ada and Hopper on.",
        choices=FP8_WAYS,
    )
    compile: bool = option(
        False, "torch.compile for each layer: fewer passes over memory, after minutes at the start. Not at ZeRO-3.",
        flags=("--compile/--no-compile",), default_text="where it was measured to pay on the job's GPUs",
    )  # fmt: skip

    @property
    def recomputed(self) -> int:
        """Layers of which backward computes one again: 1 for every layer; 0 for none."""
        return {NO_RECOMPUTING: 0, SELECTIVE: self.recompute_every}.get(self.activation_checkpointing, 1)

    @property
    def offloads_activations(self) -> bool:
        """Whether the inputs of recomputed layers wait in host memory."""
        return self.activation_checkpointing == OFFLOADED


ANSWERED_AT_ONCE = 4
"""Micro batches of prompts that a rank answers at once, at least: without gradients there is room."""
GATHERED_SHARE = 0.5
"""Share of the free memory that gathered weights may take while ranks answer: answering takes some, too."""


class EvaluationOptions(OptionGroup):
    """Evaluation and checkpoints."""

    eval_steps: int | None = option(
        None, "Steps between evaluations.", at_least=1, default_text="a fifth of the run"
    )
    generate_rows: int = option(
        100, "Held-out prompts to answer and score.", at_least=0,
        default_text="100; fewer where partitioned weights don't fit a GPU whole",
    )  # fmt: skip
    metrics: str = option(
        AUTO_METRICS,
        "How they are scored. text: ROUGE and BLEU. classification: exact match, accuracy, macro-F1.",
        choices=METRICS,
        default_text="auto: classification where answers are few different ones",
    )
    score_before: bool = option(
        False, "Answer them before training, too.", flags=("--score-before/--no-score-before",)
    )
    compute_metrics: bool = option(
        False, "Answer and score them at each evaluation, too: slow.",
        flags=("--compute-metrics/--no-compute-metrics",), default_text="the loss only",
    )  # fmt: skip


class AsyncSaveOptions(OptionGroup):
    """Evaluation and checkpoints."""

    async_save: bool = option(
        False,
        "Write checkpoints while the training goes on, of a copy in host memory.",
        flags=("--async-save/--no-async-save",),
    )


class CheckpointOptions(AsyncSaveOptions):
    """Evaluation and checkpoints."""

    save_steps: int = option(1000, "Steps between checkpoints.", at_least=1)
    keep_checkpoints: int = option(2, "Newest checkpoints to keep.", flags=("--keep",), at_least=1)
    last_checkpoint: bool = option(
        True, "A checkpoint of the last step stands until the model is written (not in runs under 20 steps)."
    )
    keep_best: bool = option(
        False,
        "Keep the model of the lowest evaluation loss, too, in best/.",
        flags=("--keep-best/--no-keep-best",),
    )
    export_format: str = option(
        "transformers",
        "chatglm: write an original ChatGLM checkpoint back in its own format, too. text: of a checkpoint with more "
        "than text the text model by itself, too. adapter: not the merged model. "
        "none: no model; `dsrun export` writes it later, from a checkpoint.",
        choices=EXPORT_FORMATS,
    )


class TrackerOptions(OptionGroup):
    """Evaluation and checkpoints.

    Where curves are shown while it runs, beside metrics.jsonl.
    """

    log: tuple[str, ...] = option((), "Show the curves there, too.", choices=TRACKERS)
    log_project: str | None = option(
        None,
        "The project that they stand in.",
        metavar="NAME",
        default_text="the tracker's own variable, else dsrun",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "log", tuple(self.log))  # JSON knows lists only


class DeviceOptions(OptionGroup):
    """Devices and hosts."""

    gpus: int | None = option(
        None, "How many free GPUs, or CPU ranks; with hosts: of each.", at_least=1, common=True
    )
    devices: str | None = option(
        None, 'Which devices, in the order of ranks: "2,3", "0-3", "host1:0-3,host2:all".', common=True
    )
    hostfile: Path | None = option(None, "A file of hosts and slots.", variable="DSRUN_HOSTFILE", common=True)
    hosts: str | None = option(None, 'The hosts, in short: "node[01-16]:8".', metavar="LIST")
    nodes: int | None = option(None, "The first N of the hosts.", at_least=1, metavar="N")
    include: str | None = option(
        None, 'Only these, as DeepSpeed writes it: "h1@h2:0,2".', flags=("-i", "--include"), metavar="FILTER"
    )
    exclude: str | None = option(None, "All but these.", flags=("-e", "--exclude"), metavar="FILTER")


class HostOptions(OptionGroup):
    """Devices and hosts.

    How other hosts are reached.
    """

    cluster: str | None = option(
        None, "A file of launch/clusters, by name or path: hosts, launcher, variables.", metavar="NAME",
        variable="DSRUN_CLUSTER", path=NAME_OR_PATH,
    )  # fmt: skip
    launcher: str = option("auto", "How hosts are reached.", choices_in="dsrun.jobs.launchers:CHOICES")
    no_check: bool = option(False, "Don't ask the hosts first what they have.")
    master_addr: str | None = option(
        None, "Where the ranks meet.", metavar="ADDRESS", default_text="the first host"
    )
    master_port: int | None = option(
        None, "And at which port.", at_least=1, at_most=65535, default_text="a free one"
    )
    env: tuple[str, ...] = option((), "A variable that the ranks get, too.", metavar="NAME[=VALUE]")


class WaitOptions(OptionGroup):
    """Devices and hosts.

    For GPUs that others use.
    """

    wait: bool = option(False, "Wait for GPUs of this machine that others use.")
    wait_timeout: float | None = option(
        None, "Wait, and give up after as many minutes.", at_least=0, metavar="MINUTES", unit="minutes"
    )


class SupervisionOptions(OptionGroup):
    """Supervision."""

    hang_timeout: float | None = option(
        None, "End a job that was silent for as many minutes, with every rank's stack in its log.", above=0,
        metavar="MINUTES", unit="minutes",
    )  # fmt: skip
    timeout: int | None = option(
        None, "How long ranks wait for one another in one exchange (DEEPSPEED_TIMEOUT).", at_least=1,
        metavar="MINUTES", unit="minutes", default_text="DeepSpeed's: 10",
    )  # fmt: skip
    host_timeout: float = option(
        1.0, "Give up a host that was silent for as many minutes; five times as many while its ranks' logs grow.",
        above=0, metavar="MINUTES", unit="minutes",
    )  # fmt: skip
    log_limit: float = option(
        1.0, "Keep as much of each rank's log, its beginning and its end; 0 for all of it.", at_least=0, metavar="GIB",
        unit="GiB",
    )  # fmt: skip
    max_restarts: int = option(0, "Start it again where it fails, at most N times.", at_least=0, metavar="N")


class SaveOnStopOptions(OptionGroup):
    """Supervision."""

    save_on_stop: float | None = option(
        None, "When it is asked to end, write a checkpoint first; it has as many minutes.", above=0, metavar="MINUTES",
        unit="minutes",
    )  # fmt: skip


class ForceOptions(OptionGroup):
    """Run."""

    force: bool = option(
        False,
        "Start what is predicted to run out of memory, has versions known to be bad, or more CPU ranks than cores.",
        command_line_only=True,
    )


class OutputOptions(OptionGroup):
    """Run."""

    output_dir: Path | None = option(
        None, "The run's folder.", default_text="runs/MODEL-PRESET-TIME", common=True
    )


class JsonOptions(OptionGroup):
    """Run."""

    as_json: bool = option(
        False, "Print the result (or the dry run) as JSON.", flags=("--json",), command_line_only=True
    )


class StartOptions(OptionGroup):
    """Run.

    How it starts.
    """

    resume: bool = option(False, "Continue the run in --output-dir.", command_line_only=True)
    go_on: bool = option(
        False, "Continue the run in --output-dir if there is one, else start it.", flags=("--continue",),
        command_line_only=True,
    )  # fmt: skip
    dry_run: bool = option(
        False, "Print what would run; start and write nothing.", common=True, command_line_only=True
    )
    output: Path | None = option(
        None, "With --dry-run: write all of it into a run file.", flags=("-o", "--output"), metavar="RUN.toml",
        command_line_only=True,
    )  # fmt: skip
    show_examples: int | None = option(
        None, "Print the first N training examples as the model would see them; start and write nothing.",
        at_least=1, metavar="N", command_line_only=True,
    )  # fmt: skip
    explain: bool = option(
        False, "Print every option with its value and where it came from.", command_line_only=True
    )


class RestoreOptions(OptionGroup):
    """Run.

    Which checkpoint is gone on from, or exported.
    """

    checkpoint: int | None = option(
        None, "The checkpoint after step N.", at_least=1, metavar="N", default_text="the newest whole one",
        command_line_only=True,
    )  # fmt: skip
    digests: bool = option(
        True, "Read all of its files first, and compare them with their digests. Sizes are always compared.",
        flags=("--digests/--no-digests",), command_line_only=True,
    )  # fmt: skip


class PushOptions(OptionGroup):
    """Run.

    Where the model goes when it is finished.
    """

    push: str | None = option(
        None,
        "Push the model to the Hugging Face Hub, in one commit; a new repository is private.",
        metavar="OWNER/NAME",
        command_line_only=True,
    )
    public: bool = option(False, "With --push: everybody may see it.", command_line_only=True)


class DetachOptions(OptionGroup):
    """Run.

    Without a terminal.
    """

    detach: bool = option(False, "Go on without this terminal once it is started.", command_line_only=True)


class HardwareOptions(OptionGroup):
    """Hardware."""

    gpu: str | None = option(
        None,
        "Kind of GPU: v100-32g, a100-80g, ... (presets/gpus).",
        metavar="NAME",
        default_text="this machine's",
    )
    gpu_memory: str | None = option(
        None, "Memory of each GPU, as 32GiB: all of it, or what is free.", metavar="SIZE"
    )
    host_memory: str | None = option(None, "Memory of each node, as 256GiB.", metavar="SIZE")


class InferenceOptions(TemplateOptions):
    """Inference."""

    thinking: str = again(TemplateOptions, "thinking", default_text="as the run was trained")
    template_arg: tuple[str, ...] = again(TemplateOptions, "template_arg", default_text="the run's")

    sample: bool = option(
        False, "Draw tokens as ChatGLM2's own evaluation does: temperature 0.95, top-p 0.7."
    )
    temperature: float | None = option(
        None, "Draw tokens; 0: always the likeliest.", at_least=0, default_text="0"
    )
    top_p: float | None = option(
        None, "Draw among the likeliest tokens that together have this probability.", above=0, at_most=1
    )
    device: int | None = option(None, "Which GPU.", at_least=0, default_text="one that nobody uses")
    prompt_format: str | None = option(
        None, "How prompts are framed: chatglm2, chatglm3, llama-2, ...", metavar="NAME",
        default_text="the run's; a folder's own",
    )  # fmt: skip
