"""The options of each command, put together from table.py. The order of the bases is the order of --help."""

from pathlib import Path

from dsrun.options.declare import COUNT, OptionGroup, again, option
from dsrun.options.optimizers import OPTIMIZERS
from dsrun.options.table import (
    FORMS,
    PRECISIONS,
    TARGETS,
    WRITTEN_FORMATS,
    AsyncSaveOptions,
    BatchOptions,
    CheckpointOptions,
    ComputeOptions,
    DetachOptions,
    DeviceOptions,
    EncodingOptions,
    EvalFileOptions,
    EvaluationOptions,
    ForceOptions,
    FormatOptions,
    HardwareOptions,
    HostOptions,
    InferenceOptions,
    JsonOptions,
    LengthOptions,
    ModelOptions,
    OptimizerArguments,
    OptimizerOptions,
    OutputOptions,
    OverrideOptions,
    ParallelismOptions,
    PeftOptions,
    PrecisionOptions,
    PushOptions,
    RestoreOptions,
    RowOptions,
    SaveOnStopOptions,
    ScheduleOptions,
    StartOptions,
    StepOptions,
    StrategyOptions,
    SupervisionOptions,
    TemplateOptions,
    TokenBatchOptions,
    TokenizerOptions,
    TrackerOptions,
    TrainingFileOptions,
    WaitOptions,
)


class FinetuneOptions(
    ModelOptions, StrategyOptions, ParallelismOptions, TrainingFileOptions, RowOptions, EvalFileOptions, FormatOptions,
    LengthOptions, TokenizerOptions, TemplateOptions, EncodingOptions, StepOptions, TokenBatchOptions, OptimizerOptions,
    OptimizerArguments, PrecisionOptions, PeftOptions, ScheduleOptions, ComputeOptions, EvaluationOptions,
    CheckpointOptions, TrackerOptions, OverrideOptions,
    DeviceOptions, HostOptions, WaitOptions, SupervisionOptions, SaveOnStopOptions, OutputOptions, StartOptions,
    RestoreOptions, PushOptions, DetachOptions, ForceOptions, JsonOptions,
):  # fmt: skip
    """Run.

    The options of `dsrun finetune`.
    """

    force: bool = again(
        ForceOptions,
        "force",
        help="Start what is predicted to run out of memory, has versions that are known to be bad, or more CPU ranks "
        "than cores; let -o replace a file.",
    )


class ResumeOptions(
    DeviceOptions,
    HostOptions,
    WaitOptions,
    SupervisionOptions,
    SaveOnStopOptions,
    RestoreOptions,
    PushOptions,
    DetachOptions,
    ForceOptions,
    JsonOptions,
):
    """Run.

    The options of `dsrun resume`.
    """

    preset: str | None = option(None, "Go on with another division of the model: zero3, zero2-offload, ...")
    tp: int | None = option(
        None,
        "Go on with tensor parallelism over as many ranks; 1: with none.",
        at_least=1,
        default_text="the run's",
    )
    sp: int | None = option(
        None,
        "Go on with sequence parallelism over as many ranks; 1: with none.",
        at_least=1,
        default_text="the run's",
    )
    ep: int | None = option(
        None,
        "Go on with every layer's experts divided over as many ranks; 1: over none.",
        at_least=1,
        default_text="the run's",
    )


class RerunOptions(FinetuneOptions):
    """Run.

    The options of `dsrun rerun`: those of finetune, each with the run's own value where nothing is said.
    """

    output_dir: Path | None = again(
        OutputOptions, "output_dir", help="The new run's folder.", default_text="beside RUN"
    )


class ConfigOptions(OptionGroup):
    """DeepSpeed config.

    None leaves a value to the preset.
    """

    micro_batch: int | None = option(None, "Examples per device and micro-step.", at_least=1)
    grad_accum: int | None = option(None, "Micro-steps per optimizer step.", at_least=1)
    grad_clip: float | None = option(None, "Gradient norm to clip at; 0: never.", at_least=0)
    precision: str | None = option(
        None,
        "Of weights and activations.",
        choices=PRECISIONS,
        default_text="fp16, or HF Trainer's or accelerate's choice",
    )


class PresetOptions(ConfigOptions, OverrideOptions, HardwareOptions):
    """Output.

    The options of `dsrun preset`.
    """

    gpus: int = option(1, "GPUs per node.", at_least=1)
    nodes: int = option(1, "Number of nodes.", at_least=1)
    target: str = option(
        "deepspeed",
        'Who reads it: deepspeed.initialize (numbers only), HF Trainer ("auto" where it fills in), or accelerate '
        "(its YAML, too).",
        flags=("--for",),
        choices=TARGETS,
    )
    model: str | None = option(
        None, "Print what `dsrun finetune MODEL` runs with it, here or on --gpu. For NAME auto: as `dsrun plan` takes "
        "it.", metavar="MODEL",
    )  # fmt: skip
    seq_len: int | None = option(
        None, "For NAME auto: tokens of an example.", at_least=1, default_text="the model file's lengths"
    )
    activation_checkpointing: str = again(
        ComputeOptions, "activation_checkpointing", help="For NAME auto: plan with it.", common=False
    )
    fsdp_version: int = option(
        2, "Of a preset of FSDP's, for accelerate: torch's FSDP 1 or 2.", at_least=1, at_most=2
    )
    explain: bool = option(False, "Each value: where it came from and what it does.")
    copy_to: str | None = option(
        None, "Copy the preset's own file to DIR/presets, to edit it.", flags=("--copy",), metavar="DIR"
    )
    from_file: str | None = option(
        None, "Write the preset that FILE, a DeepSpeed config, comes to.", flags=("--from",), metavar="FILE"
    )
    output: str | None = option(None, "Write the config to a file.", flags=("-o", "--output"), metavar="FILE")
    force: bool = option(False, "Let -o and --copy replace a file.")
    as_json: bool = option(False, "The list or the explanation as JSON.", flags=("--json",))


class ConvertOptions(OptionGroup):
    """Conversion.

    The options of `dsrun convert`.
    """

    to: str | None = option(
        None, "The form to write.", choices=FORMS, default_text="of a YAML deepspeed, of a config accelerate"
    )
    gpus: int = option(1, "For a YAML: GPUs per node.", at_least=1)
    nodes: int = option(1, "For a YAML: number of nodes.", at_least=1)
    output: Path | None = option(
        None, "The new file.", flags=("-o", "--output"), metavar="FILE", default_text="stdout"
    )
    force: bool = option(False, "Replace that file.")


class LaunchOptions(
    ConfigOptions, OverrideOptions, DeviceOptions, HostOptions, WaitOptions, SupervisionOptions, DetachOptions
):
    """Run.

    The options of `dsrun launch`.
    """

    module: bool = option(False, "SCRIPT is a module's name, as with python -m.", flags=("-m", "--module"))
    preset: str | None = option(None, "Make the DeepSpeed config of a preset, and hand it to the script.")
    lr: float | None = option(None, "Preset: the optimizer's learning rate.", above=0)
    precision: str | None = again(
        ConfigOptions, "precision", default_text="what the devices do best, or HF Trainer's choice"
    )
    python: Path | None = option(
        None, "The Python that runs SCRIPT: a lab's own environment, on every host. It needs nothing of dsrun.",
        metavar="PATH", default_text="the one that runs dsrun",
    )  # fmt: skip
    accelerate: Path | None = option(
        None, "Start SCRIPT as `accelerate launch --config_file FILE` would: its variables, on dsrun's ranks.",
        metavar="FILE",
    )  # fmt: skip
    config_option: str | None = option(
        None,
        "How SCRIPT takes a config, where its source doesn't tell: --ds-config, or ds= for one word.",
        metavar="NAME",
    )
    local_rank: bool | None = option(
        None,
        "Give SCRIPT --local_rank=N first, as DeepSpeed does.",
        default_text="with DeepSpeed; else if its parser takes it",
    )
    output_dir: Path | None = option(None, "The run's folder.", default_text="runs/SCRIPT-TIME")
    go_on: bool = option(
        False, "Start it again in --output-dir, where it was started before.", flags=("--continue",)
    )
    force: bool = option(False, "Start it with a config that is wrong, or on more CPU ranks than cores.")
    dry_run: bool = option(False, "Print what would run; start and write nothing.")
    as_json: bool = option(
        False, "Print the result (or the dry run) as JSON, the rest to stderr.", flags=("--json",)
    )


class ImportOptions(OptionGroup):
    """Import.

    The options of `dsrun import`.
    """

    gpus: int | None = option(
        None,
        "Ranks of the job, where a step counts packed rows.",
        at_least=1,
        default_text="what a script says, else 1",
    )
    dataset_dir: Path | None = option(
        None,
        "LLaMA-Factory: the folder with dataset_info.json.",
        metavar="DIR",
        default_text="the file's, data, or beside the file",
    )
    output: Path | None = option(
        None, "The run file.", flags=("-o", "--output"), metavar="RUN.toml", default_text="stdout"
    )
    force: bool = option(False, "Replace that file.")
    as_json: bool = option(False, "Print what became of each argument as JSON.", flags=("--json",))


class SubmitOptions(OptionGroup):
    """Submission.

    The options of `dsrun submit`.
    """

    cluster: str | None = again(HostOptions, "cluster", help="A file of launch/clusters, by name or path.")
    nodes: int = option(1, "How many nodes.", at_least=1)
    gpus_per_node: int | None = option(None, "GPUs of each node.", at_least=1, default_text="the cluster's")
    time_limit: str | None = option(
        None, "Time limit: 90 (minutes), 2:00:00 or 1-12 (days-hours).", flags=("--time",)
    )
    partition: str | None = option(
        None, "Partition, or several: a,b.", default_text="the cluster's, else Slurm's"
    )
    account: str | None = option(None, "Account that is charged.", default_text="the cluster's, else Slurm's")
    qos: str | None = option(None, "Quality of service.", default_text="the cluster's, else Slurm's")
    job_name: str | None = option(None, "Name in the queue.", default_text="the run folder's")
    output_dir: Path | None = option(None, "The run's folder.", default_text="runs/NAME-TIME")
    output: Path | None = option(None, "Kubernetes: the manifest's file.", default_text="stdout")
    dry_run: bool = option(False, "Print the script or manifest; send and write nothing.")
    as_json: bool = option(False, "Print the result (or the dry run) as JSON.", flags=("--json",))


class BoardOptions(OptionGroup):
    """Board.

    The options of `dsrun board`.
    """

    port: int | None = option(
        None, "The port on the loopback address; 0: any that is free.", at_least=0, at_most=65535, metavar="PORT",
        default_text="8420, or a free one",
    )  # fmt: skip


class TuneOptions(JsonOptions):
    """Tuning.

    The options of `dsrun tune`, which has finetune's beside them.
    """

    trials: int = option(8, "Runs at most.", at_least=1, at_most=1000)
    trial_steps: int = option(
        8, "Steps of a short one; the faster half is tried again with twice as many.", at_least=3
    )
    folder: Path = option(
        Path("tuned"), "What is tried and found stays there; the same command goes on with it."
    )
    knobs: tuple[str, ...] = option(
        (), "One more option of finetune and the values to try (repeat for more).", flags=("--knob",),
        metavar="NAME=A,B",
    )  # fmt: skip


class ReportOptions(OptionGroup):
    """Report.

    The options of `dsrun report`.
    """

    output: Path = option(Path("report.html"), "The file.", flags=("-o", "--output"), metavar="FILE")
    watch: bool = option(False, "Write it again every 10 seconds while a run goes on.")
    force: bool = option(False, "Let -o replace a file that is no report.")


LONGEST = 100_000_000
"""Tokens of an example: no network has been made for more."""


class PlanOptions(
    HardwareOptions, StepOptions, TokenBatchOptions, LengthOptions, FormatOptions, PrecisionOptions, ModelOptions,
    PeftOptions, ComputeOptions, AsyncSaveOptions,
):  # fmt: skip
    """Plan.

    The options of `dsrun plan`: those of finetune that memory and seconds depend on, and where it is to run.
    """

    micro_batch: int = again(
        BatchOptions, "micro_batch", default_text="searched, with the accumulation that keeps --global-batch"
    )

    params: float | None = option(
        None, "Parameters of a Llama-like model, in place of MODEL: 6.2e9.", above=0, unit=COUNT
    )
    hidden: int | None = option(None, "Its hidden size.", at_least=1)
    layers: int | None = option(None, "Its layers.", at_least=1)
    intermediate: int | None = option(None, "Its feed-forward width.", at_least=1)
    heads: int | None = option(None, "Its query heads.", at_least=1)
    kv_heads: int | None = option(None, "Its key/value heads.", at_least=1)
    vocab: int | None = option(None, "Its vocabulary.", at_least=1)
    gpus: int | None = option(
        None, "GPUs per node.", at_least=1, at_most=1024, default_text="1, or all of this machine"
    )
    nodes: int = option(1, "Number of nodes.", at_least=1, at_most=100_000)
    nvme: str | None = option(None, "Room on each node's NVMe disk, as 2TB.", metavar="SIZE")
    network: float | None = option(
        None, "Gbit/s between nodes, per node.", above=0, metavar="GBIT", default_text="100"
    )
    presets: tuple[str, ...] = option((), "Only this preset (repeat for more).", flags=("--preset",))
    seq_len: int | None = option(
        None, "Tokens of an example.", at_least=1, at_most=LONGEST, default_text="the model file's lengths"
    )
    train_file: Path | None = option(None, "Measure the examples of this file instead.")
    optimizer: str = option("adamw", "Optimizer.", choices=tuple(OPTIMIZERS))
    activation_checkpointing: str = again(
        ComputeOptions,
        "activation_checkpointing",
        default_text="searched: the fastest of none, selective (2) and full that fits",
    )
    purpose: str = option(
        "training", "What the model is to do.", flags=("--for",), choices=("training", "inference")
    )
    beams: int = option(1, "For inference: beams of its search.", at_least=1, at_most=1024)
    offload_weights: bool = option(
        False, "For inference: weights wait in host memory, and come to the GPU for every token."
    )
    price: float | None = option(
        None,
        "What a GPU costs for an hour: says what an epoch of --train-file costs.",
        above=0,
        metavar="MONEY",
    )
    trainer: str = option(
        "dsrun", "Who trains: dsrun, hf, trl, llama-factory, ms-swift, axolotl, torchtune (presets/trainers).",
        metavar="NAME",
    )  # fmt: skip
    layouts: bool = option(
        False, "Compare layouts of data, tensor, sequence and pipeline parallelism over all GPUs."
    )
    cards: tuple[str, ...] = option(
        (), "Compare this kind of GPU, too: all, or a price for an hour behind its name (repeat for more).",
        flags=("--card",), metavar="NAME[=PRICE]",
    )  # fmt: skip
    lengths: bool = option(
        False, "Memory by the length of an example, and the longest that fits; --plot draws it."
    )
    timeline: bool = option(False, "The first plan's memory over a step.")
    wide: bool = option(False, "Every column, however wide the terminal is.")
    components: bool = option(False, "Every term of the first plan, with formula and source.")
    plot: str | None = option(None, "Draw the plans against the card, as PNG, SVG or PDF.", metavar="FILE")
    trace: bool = option(
        True,
        "Trace the model for the best plans, on tensors without data; without it the formulas alone count.",
        variable="DSRUN_TRACE",
        default_text="on, unless $DSRUN_TRACE is 0",
    )
    measure: bool = option(
        False,
        "Train a few steps on one GPU or CPU rank here, with two micro batches, and plan with what they took.",
    )
    calibrate: bool = option(False, "Learn from finished runs: MODEL is then one or more run folders.")
    as_json: bool = option(False, "Print the result as JSON.", flags=("--json",))


class ChatOptions(InferenceOptions, PrecisionOptions):
    """Conversation.

    The options of `dsrun chat`.
    """

    prompt: str | None = option(
        None, "One question, one answer; -: the question is what stdin holds.", metavar="TEXT"
    )
    system: str | None = option(
        None, "What the model is told before the conversation.", metavar="TEXT",
        default_text="the text that all of the run's training rows had",
    )  # fmt: skip
    max_new_tokens: int = option(512, "Tokens of an answer, at most.", at_least=1)
    seed: int | None = option(None, "Decides what is drawn.", at_least=0)
    adapter: Path | None = option(
        None, "What was trained beside the model in FOLDER: LoRA's folder, or a P-Tuning checkpoint."
    )


class ExportOptions(RestoreOptions, PushOptions, JsonOptions):
    """Export.

    The options of `dsrun export`.
    """

    output: Path | None = option(
        None, "The new folder.", flags=("-o", "--output"), metavar="DIR", default_text="model/ in RUN"
    )
    export_format: str | None = option(
        None, "chatglm: the format that the model came in. text: the text model alone. adapter: not the merged model.",
        choices=WRITTEN_FORMATS, default_text="the run's",
    )  # fmt: skip


class EvaluateOptions(
    EvalFileOptions, FormatOptions, LengthOptions, InferenceOptions, PrecisionOptions, JsonOptions
):
    """Evaluation.

    The options of `dsrun evaluate`.
    """

    eval_file: Path | None = again(EvalFileOptions, "eval_file", default_text="the run's")
    prompt_column: str = again(FormatOptions, "prompt_column", default_text="the run's, or content")
    response_column: str = again(FormatOptions, "response_column", default_text="the run's, or summary")
    history_column: str = again(FormatOptions, "history_column", default_text="the run's, or history")
    text_column: str = again(FormatOptions, "text_column", default_text="the run's, or text")
    data_format: str = again(
        FormatOptions, "data_format", default_text="the run's; of another file what its columns tell"
    )
    max_length: int | None = again(LengthOptions, "max_length", default_text="the run's, or 1024")
    max_source_length: int = again(LengthOptions, "max_source_length", default_text="the run's")
    max_target_length: int = again(LengthOptions, "max_target_length", default_text="the run's")
    limit: int | None = option(None, "Only the first N examples.", at_least=1, metavar="N")
    generate_rows: int | None = option(
        None,
        "Prompts to answer; 0: only the loss.",
        at_least=0,
        default_text="all; of the run's own file as many as it answered, after --pp 100",
    )
    metrics: str = again(EvaluationOptions, "metrics", default_text="the run's, or auto")
    micro_batch: int | None = option(
        None, "Examples at once; prompts: four times as many.", at_least=1, default_text="the run's"
    )
    seed: int = option(ScheduleOptions.seed, "Decides what is drawn.", at_least=0)
    adapter: Path | None = option(
        None, "What was trained beside the model in FOLDER: LoRA's folder, or a P-Tuning checkpoint."
    )
    output: Path | None = option(
        None, "The answers' file.", default_text="predictions-....jsonl in the run's folder"
    )
    force: bool = option(False, "Replace that file.")
