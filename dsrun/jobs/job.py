"""The Job: an immutable value that holds everything needed to repeat a run.

There are two kinds: a `Job` fine-tunes a model, a `ScriptJob` runs the user's own DeepSpeed script. Either is written
to the run folder as job.json; the training package reads it there and needs nothing else of dsrun's. Paths are
absolute. Every number is explicit: nothing is left for the ranks to decide.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError

FORMAT = 1


@dataclass(frozen=True)
class ModelSpec:
    """What is fine-tuned and how it is spoken to.

    name: as the user named it. source: "random" (weights drawn from `architecture` on first use), "folder" (a
    Hugging Face folder), "chatglm" (a folder in ChatGLM's original format), "gguf" (one GGUF file) or "hub" (a
    repository that is still to be downloaded). location: the folder, the file or the repository's name; for
    "random" the file that describes the model.
    prompt_format: a name in dsrun/training/prompts.py.
    architecture: for "random" and "chatglm", the transformers config: {"model_type": ..., field: value}, and for
    "random" the "seed". tokenizer: for "random", how its tokenizer is trained; for "chatglm", its "style".
    """

    name: str
    source: str
    location: str
    prompt_format: str
    architecture: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSpec:
    """The rows: files, columns and lengths (in tokens, special tokens included).

    more_files: training files after the first; weights: how often the rows of each training file are in an epoch;
    empty: once. data_format: a key of dsrun.talks.FORMATS, or "auto": what each file's columns tell. strict_data: no
    row may be left out. official: encoded as ChatGLM2's own fine-tuning script does.
    """

    train_file: str
    eval_file: str | None
    prompt_column: str
    response_column: str
    max_source_length: int
    max_target_length: int
    more_files: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    history_column: str = "history"
    data_format: str = "auto"
    train_on_prompt: bool = False
    strict_data: bool = False
    official: bool = False

    def __post_init__(self) -> None:
        for name in ("more_files", "weights"):  # JSON knows lists only
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def train_files(self) -> tuple[str, ...]:
        """All training files."""
        return (self.train_file, *self.more_files)


@dataclass(frozen=True)
class TrainingSpec:
    """How long and how it is trained. Steps are optimizer steps.

    Exactly one of epochs and max_steps is given. eval_steps None: at the start, at the end and four times in
    between. generate_rows: how many evaluation prompts are answered and scored. score_before: answer them with
    the model as it came, too. packing: several rows in one line, kept apart; never where the data are official.
    export_format: "transformers"; "chatglm": beside that in the original format that the model came in, too;
    "adapter": of LoRA the adapter alone.
    optimizer: "adamw", which the ds_config describes; or "adamw-8bit", which the ranks make with optimizer_params.
    liger: the loss is computed together with the output layer. attention: "auto", "sdpa", "flash" or "eager".
    compute_metrics: the prompts are answered and scored at every evaluation.
    """

    lr: float
    lr_schedule: str
    warmup_steps: int
    epochs: float | None
    max_steps: int | None
    seed: int
    eval_steps: int | None
    save_steps: int
    keep_checkpoints: int
    generate_rows: int
    score_before: bool
    gradient_checkpointing: bool
    packing: bool = False
    export_format: str = "transformers"
    optimizer: str = "adamw"
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    liger: bool = False
    attention: str = "auto"
    compute_metrics: bool = False


@dataclass(frozen=True)
class TuningSpec:
    """What is trained.

    method: "full" (every weight), or what leaves the model's own weights as they are: "lora", "qlora" (LoRA on matrices
    in 4 bits) or "ptuning" (P-Tuning v2: trained keys and values in front of every layer's own).
    lora_target: linear layers by the last part of their names, with commas between; "all": every one but the output's.
    pre_seq_len: positions of P-Tuning's prefix. adapter: the folder or file that the training starts from, if any.
    """

    method: str = "full"
    lora_rank: int = 8
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_target: str = "all"
    pre_seq_len: int = 128
    prefix_dropout: float = 0.1
    adapter: str | None = None

    @property
    def freezes(self) -> bool:
        """Whether the model's own weights stay as they are."""
        return self.method != "full"

    @property
    def dropout(self) -> float:
        """How much is dropped of what is trained, at random in every step."""
        by_method = {"full": 0.0, "ptuning": self.prefix_dropout}
        return by_method.get(self.method, self.lora_dropout)


LOCAL = "localhost"
"""How a job's hosts call the machine that dsrun itself runs on."""


@dataclass(frozen=True)
class HostDevices:
    """One host of the job and the devices that its ranks use, in rank order.

    host: its name as ssh or the scheduler knows it; LOCAL for this machine. visible: what CUDA calls the devices, one
    entry for each, where that isn't their indices (UUIDs, MIG slices, what a scheduler gave); empty otherwise.
    """

    host: str
    devices: tuple[int, ...]
    visible: tuple[str, ...] = ()

    @property
    def cuda_visible_devices(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES that the host's ranks get."""
        return ",".join(self.visible or map(str, self.devices))


def world_size_of(hosts: tuple[HostDevices, ...]) -> int:
    """Ranks over all hosts."""
    return sum(len(host.devices) for host in hosts)


@dataclass(frozen=True)
class Prepared:
    """Where the prepared model folder and the tokenised rows are (or will be) in the cache."""

    model_dir: str
    train_rows: str
    eval_rows: str | None


@dataclass(frozen=True, kw_only=True)
class _OnHosts:
    """What every job has. hosts: in the order of ranks."""

    run_dir: str
    hosts: tuple[HostDevices, ...]

    @property
    def world_size(self) -> int:
        """Ranks over all hosts."""
        return world_size_of(self.hosts)

    def to_json(self) -> str:
        """The text of job.json."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=2) + "\n"


@dataclass(frozen=True, kw_only=True)
class Job(_OnHosts):
    """A fine-tune. accelerator: "cuda" or "cpu". precision: "fp32", "bf16" or "fp16".

    tuning: which weights are trained.
    prediction: what the planner said it will take (dsrun.jobs.fitting.prediction); None where it said nothing.
    launcher: the name of a module in dsrun/jobs/launchers, which starts the job on its hosts.
    """

    model: ModelSpec
    data: DataSpec
    training: TrainingSpec
    preset: str
    precision: str
    accelerator: str
    ds_config: dict[str, Any]
    prepared: Prepared
    dsrun_version: str
    prediction: dict[str, float | str] | None = None
    launcher: str = "local"
    tuning: TuningSpec = field(default_factory=TuningSpec)
    format: int = FORMAT

    @property
    def title(self) -> str:
        """What it is, for people."""
        return f"{self.model.name} with preset {self.preset}"

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage of the ds_config."""
        return int(self.ds_config.get("zero_optimization", {}).get("stage", 0))

    @property
    def micro_batch(self) -> int:
        """Rows per rank and micro-step."""
        return int(self.ds_config["train_micro_batch_size_per_gpu"])

    @property
    def grad_accum(self) -> int:
        """Micro-steps per optimizer step."""
        return int(self.ds_config["gradient_accumulation_steps"])

    @staticmethod
    def from_json(text: str, where: str) -> Job:
        """The job of a job.json. Raises DsrunError where the text is not a fine-tune's (`where` names the file)."""
        return _only(from_json(text, where), Job, where)

    @staticmethod
    def read(path: Path) -> Job:
        """Read a fine-tune's job.json."""
        return _only(read(path), Job, str(path))


@dataclass(frozen=True, kw_only=True)
class ScriptJob(_OnHosts):
    """The user's own DeepSpeed script.

    script: its path, or a module's name where `module` is set; args: what follows it. cwd: the folder that it is run
    in. local_rank: whether it is given --local_rank=N first, as DeepSpeed's launcher does. preset, ds_config: what
    deepspeed.json in the run folder was made from and holds, None where the script brings its own.
    """

    script: str
    args: tuple[str, ...]
    cwd: str
    accelerator: str
    dsrun_version: str
    module: bool = False
    local_rank: bool = True
    preset: str | None = None
    ds_config: dict[str, Any] | None = None
    launcher: str = "local"
    kind: str = "script"
    format: int = FORMAT

    @property
    def title(self) -> str:
        """What it is, for people."""
        return self.script if self.module else Path(self.script).name


AnyJob = Job | ScriptJob


def from_json(text: str, where: str) -> AnyJob:
    """The job of a job.json. Raises DsrunError where the text is not one (`where` names the file)."""
    hint = "It was changed by hand or written by another version of dsrun; start a new run instead."
    try:
        raw = json.loads(text)
        if raw.get("format") != FORMAT:
            raise DsrunError(f"has format {raw.get('format')!r}, this dsrun reads {FORMAT}", where=where)
        raw["hosts"] = tuple(
            HostDevices(h["host"], tuple(h["devices"]), tuple(h.get("visible", ()))) for h in raw["hosts"]
        )
        if raw.get("kind") == "script":
            return ScriptJob(**{**raw, "args": tuple(raw["args"])})
        raw["model"] = ModelSpec(**raw["model"])
        raw["data"] = DataSpec(**raw["data"])
        raw["training"] = TrainingSpec(**raw["training"])
        raw["prepared"] = Prepared(**raw["prepared"])
        raw["tuning"] = TuningSpec(**raw.get("tuning", {}))
        return Job(**raw)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DsrunError(f"is not a job file: {error}", where=where, hint=hint) from error


def read(path: Path) -> AnyJob:
    """Read a job.json."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DsrunError(f"can't be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise DsrunError("is not a job file: it is not UTF-8", where=str(path)) from error
    return from_json(text, str(path))


def _only(job: AnyJob, kind: type[Job], where: str) -> Job:
    if not isinstance(job, kind):
        raise DsrunError("is a script's run, not a fine-tune", where=where)
    return job
