"""The Job: an immutable value that holds everything needed to repeat a run.

There are two kinds: a `Job` fine-tunes a model, a `ScriptJob` runs the user's own DeepSpeed script. Either is written
to the run folder as job.json; the training package reads it there and needs nothing else of dsrun's. Paths are
absolute. Every number is explicit: nothing is left for the ranks to decide. What looks like a secret (an argument of a
script, a variable, a password in a URL) is hidden in job.json and stands in secrets.json beside it, for its owner.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dsrun.ds_config import offloads, zero_stage
from dsrun.errors import BOUNDLESS, DsrunError
from dsrun.files import json_text, read_text_inside, write_atomic
from dsrun.host.hiding import HIDDEN, shown, shown_arguments, shown_value
from dsrun.job.layout import JOB, LAST_FROM_STEPS, SECRETS
from dsrun.options.table import (
    CheckpointOptions,
    ComputeOptions,
    EncodingOptions,
    EvaluationOptions,
    FormatOptions,
    LengthOptions,
    OptimizerOptions,
    ParallelismOptions,
    PeftOptions,
    ScheduleOptions,
    TokenBatchOptions,
    TrackerOptions,
)
from dsrun.words import counted

FORMAT = 5
T = TypeVar("T")


@dataclass(frozen=True)
class ModelSpec:
    """The model that is fine-tuned, and its prompt format.

    name: as the user named it. source: "random" (weights drawn from `architecture` on first use), "folder" (a
    Hugging Face folder), "chatglm" (a folder in ChatGLM's original format), "gguf" (one GGUF file) or "hub" (a
    repository that is still to be downloaded). location: the folder, the file or the repository's name; for
    "random" the file that describes the model.
    prompt_format: a name in dsrun/training/data/prompts.py.
    architecture: for "random" and "chatglm", the transformers config: {"model_type": ..., field: value}, and for
    "random" the "seed"; for "gguf" what its header says under the config's names.
    tokenizer: for "random", how its tokenizer is trained; for "chatglm", its "style".
    chat_template: Jinja in the place of the tokenizer's own; empty: that one. special_tokens: what the tokenizer lacks
    and gets, each with a row of the embeddings.
    thinking: "auto", "on" or "off", and template_args: variables for the chat template (dsrun/data/thoughts.py).
    """

    name: str
    source: str
    location: str
    prompt_format: str
    architecture: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    chat_template: str = ""
    special_tokens: tuple[str, ...] = ()
    thinking: str = "auto"
    template_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "special_tokens", tuple(self.special_tokens))  # JSON knows lists only

    @property
    def tells_template(self) -> bool:
        """Whether the chat template gets an argument that decides how examples look."""
        return self.thinking != "auto" or bool(self.template_args)


class DataSpec(FormatOptions, LengthOptions, EncodingOptions):
    """The examples: files, columns and lengths (in tokens, special tokens included)."""

    train_file: str
    eval_file: str | None
    more_files: tuple[str, ...] = ()
    """Training files after the first."""
    weights: tuple[float, ...] = ()
    """How often the examples of each training file are in an epoch; empty: once."""

    def __post_init__(self) -> None:
        for name in ("more_files", "weights"):  # JSON knows lists only
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def train_files(self) -> tuple[str, ...]:
        """All training files."""
        return (self.train_file, *self.more_files)

    def answer_tokens(self, prompts: Sequence[int], positions: int | None) -> int:
        """Tokens of the answers to a batch of prompts (their tokens), at most.

        A prompt may have taken what its response left of a limit for both: the answer gets what it leaves.
        """
        most = self.max_target_length
        if self.max_length is not None:
            most = min(most, self.max_length - min(prompts))
        if positions is not None:
            most = min(most, positions - max(prompts))
        return max(1, most)


class TrainingSpec(
    TokenBatchOptions, OptimizerOptions, ScheduleOptions, ComputeOptions, EvaluationOptions, CheckpointOptions
):
    """How it is trained: finetune's options of the same names. Steps are optimizer steps.

    One of epochs and max_steps is None. eval_steps None: at the start, at the end and four times in between. liger is
    decided: whether liger-kernel's kernels are used, those that it has for the model.
    """

    def writes_last(self, steps: int) -> bool:
        """Whether a run of that many steps has a checkpoint of its last step, until the model is written."""
        return self.last_checkpoint and steps >= LAST_FROM_STEPS

    def keeps_last(self, steps: int) -> bool:
        """Whether that last checkpoint stays when the model is written: it does where others do."""
        return steps > self.save_steps

    optimizer_params: dict[str, Any] = field(default_factory=dict)
    """Parameters of an optimizer that the ranks make, because DeepSpeed can't make it from its config."""


LOCAL = "localhost"
"""The name of the machine that dsrun itself runs on, among a job's hosts."""


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


def world_size_of(hosts: Sequence[HostDevices]) -> int:
    """Ranks over all hosts."""
    return sum(len(host.devices) for host in hosts)


def ranks_of(hosts: Sequence[HostDevices], number: int) -> range:
    """The ranks of a host, by its number from 0."""
    first = world_size_of(hosts[:number])
    return range(first, first + len(hosts[number].devices))


def devices_text(hosts: Sequence[HostDevices]) -> str:
    """Hosts with their devices, in the order of the ranks: "localhost: 0,1; node2: 0-7"."""
    return "; ".join(f"{host.host}: {_numbers_text(host.devices)}" for host in hosts)


def _numbers_text(numbers: Sequence[int]) -> str:
    """Numbers as "0,1" or "0-7": three or more in a row are a range."""
    first, last = min(numbers, default=0), max(numbers, default=0)
    if len(numbers) > 2 and list(numbers) == list(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, numbers))


def node_shape(hosts: Sequence[HostDevices]) -> tuple[int, int]:
    """Ranks of each host, and how many hosts, as a config counts them; all ranks on one host where hosts differ."""
    counts = {len(host.devices) for host in hosts}
    return (counts.pop(), len(hosts)) if len(counts) == 1 else (world_size_of(hosts), 1)


@dataclass(frozen=True, kw_only=True)
class FsdpSpec:
    """How a job is trained with FSDP2, which has no config file like DeepSpeed's."""

    micro_batch: int
    """Rows per rank and micro-step."""
    grad_accum: int
    """Micro-steps per optimizer step."""
    grad_clip: float
    """The gradient's largest norm; 0: no limit."""
    shard_ranks: int
    """Neighbouring ranks that share one copy of the model: all of them, or a divisor of their number."""
    offload: bool = False
    """Weights, gradients and optimizer states are in host memory between their uses."""
    whole_gradients: bool = False
    """Whether each rank keeps whole gradients until a step's last micro-step, and reduces them once."""


@dataclass(frozen=True)
class InputFile:
    """A file that a run is made of, as it was when the run was planned."""

    path: str
    kind: str
    """TRAIN, EVAL, TOKENIZER, CONFIG, WEIGHTS or ADAPTER of dsrun/data/inputs.py."""
    size: int
    """In bytes."""
    mtime_ns: int
    """When it was written last, in nanoseconds since 1970."""
    digest: str
    """SHA-256 of its content; of a large file of weights, of samples of it (dsrun/data/inputs.py)."""


@dataclass(frozen=True)
class Inputs:
    """The files that a run is made of, and the host that read them."""

    host: str
    files: tuple[InputFile, ...]

    def of(self, kind: str) -> list[InputFile]:
        """The files of a kind, in their order."""
        return [file for file in self.files if file.kind == kind]


@dataclass(frozen=True)
class Prepared:
    """Paths of the prepared model folder and the tokenised rows, which may be made later, in the cache."""

    model_dir: str
    train_rows: str
    eval_rows: str | None
    inputs: Inputs | None = None
    """The files that they are made of; None in the job.json of an older dsrun."""


@dataclass(frozen=True, kw_only=True)
class _OnHosts:
    """The fields of every job. hosts: in the order of ranks."""

    run_dir: str
    hosts: tuple[HostDevices, ...]

    @property
    def world_size(self) -> int:
        """Ranks over all hosts."""
        return world_size_of(self.hosts)

    def shown(self) -> dict[str, Any]:
        """The job's fields for a screen, without secrets."""
        return _divided(dataclasses.asdict(self))[0]

    def to_json(self) -> str:
        """The text of job.json, without secrets; its "secrets" lists where in it they belong."""
        public, secrets = _divided(dataclasses.asdict(self))
        held = {"secrets": [path for path, _ in secrets]} if secrets else {}
        return json_text({**public, **held}, indent=2) + "\n"

    def write(self) -> None:
        """Write job.json into the run's folder, and its secrets into a file beside it. Raises DsrunError."""
        # Secrets first: a job.json whose secrets are not there yet could not be run.
        beside = Path(self.run_dir) / SECRETS
        _, secrets = _divided(dataclasses.asdict(self))
        if secrets:
            write_atomic(beside, json_text(secrets, indent=2) + "\n", private=True)
        write_atomic(Path(self.run_dir) / JOB, self.to_json())
        if not secrets:
            beside.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True)
class Job(_OnHosts):
    """A fine-tune. accelerator: "cuda" or "cpu". precision: "fp32", "bf16" or "fp16".

    prediction: the planner's estimate (jobs.assembly.checks.memory_check.prediction); None where it made none.
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
    prediction: dict[str, Any] | None = None
    launcher: str = "local"
    peft: PeftOptions = field(default_factory=PeftOptions)
    """What of the model is trained, and how."""
    parallel: ParallelismOptions = field(default_factory=ParallelismOptions)
    """How many ranks work on the same examples."""
    trackers: TrackerOptions = field(default_factory=TrackerOptions)
    """The trackers that show its curves."""
    origins: dict[str, dict[str, str]] = field(default_factory=dict)
    """Who set each value: "config" by the key of ds_config, "options" by the option's name. Empty in the job.json of
    an older dsrun."""
    fsdp: FsdpSpec | None = None
    """Settings of FSDP2, which trains it then in place of DeepSpeed; ds_config is empty."""
    format: int = FORMAT

    @property
    def title(self) -> str:
        """A name of the run for people."""
        return f"{self.model.name} with preset {self.preset}"

    @property
    def division(self) -> str:
        """How the model is divided among the ranks, for people."""
        if self.fsdp is None:
            groups = {"tp": self.parallel.tp, "sp": self.parallel.sp, "pp": self.parallel.pp}
            divided = [f"{name} {size}" for name, size in groups.items() if size > 1]
            layout = ", " + " x ".join([*divided, f"dp {self.dp_size}"]) if divided else ""
            if self.parallel.ep > 1:
                layout += f", experts over {self.parallel.ep} ranks"
            return f"ZeRO stage {self.zero_stage}{layout}"
        copies = self.world_size // self.fsdp.shard_ranks
        shared = f"FSDP, sharded over {self.fsdp.shard_ranks} ranks" + f", {copies} copies" * (copies > 1)
        return f"{shared}, offloaded" if self.fsdp.offload else shared

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage of the ds_config."""
        return zero_stage(self.ds_config)

    @property
    def offloads(self) -> bool:
        """Whether the host's cores step the optimizer of a GPU's job."""
        return self.fsdp.offload if self.fsdp else offloads(self.ds_config)

    @property
    def micro_batch(self) -> int:
        """Examples of a data-parallel rank's micro-step."""
        return self.fsdp.micro_batch if self.fsdp else int(self.ds_config["train_micro_batch_size_per_gpu"])

    @property
    def grad_accum(self) -> int:
        """Micro-steps per optimizer step."""
        return self.fsdp.grad_accum if self.fsdp else int(self.ds_config["gradient_accumulation_steps"])

    @property
    def grad_clip(self) -> float | None:
        """The gradient's largest norm; 0: no limit; None where the config leaves it to DeepSpeed."""
        return self.fsdp.grad_clip if self.fsdp else self.ds_config.get("gradient_clipping")

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: the shares that a step's examples are divided into."""
        return self.world_size // self.parallel.group

    def dp_index(self, rank: int) -> int:
        """The share that a rank works on: its neighbours have the same one; in a pipeline they are of one stage."""
        return rank % self.dp_size if self.parallel.pp > 1 else rank // self.parallel.group

    @property
    def step_examples(self) -> int:
        """Examples of an optimizer step, over all ranks."""
        return self.dp_size * self.micro_batch * self.grad_accum

    @property
    def step_size(self) -> str:
        """Examples or tokens of an optimizer step, in words."""
        tokens = self.training.tokens_per_batch
        return f"up to {counted(tokens, 'token')}" if tokens else counted(self.step_examples, "example")

    @staticmethod
    def from_json(text: str, where: str) -> Job:
        """The job of a job.json. Raises DsrunError where the text is not a fine-tune's (`where` names the file)."""
        return _only(from_json(text, where), Job, where)

    @staticmethod
    def read(path: Path) -> Job:
        """A fine-tune's job.json, with its secrets, to run it."""
        return _only(read(path), Job, str(path))

    @staticmethod
    def read_shown(path: Path) -> Job:
        """A fine-tune's job.json, without secrets, to look at."""
        return _only(read_shown(path), Job, str(path))


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
    env: dict[str, str] = field(default_factory=dict)
    """Variables for its ranks, from a launch config of accelerate's."""
    plain: bool = False
    """Its ranks get torchrun's variables and nothing of DeepSpeed, whose launcher isn't used."""
    python: str | None = None
    """The Python that runs it, where that is not dsrun's own."""
    launcher: str = "local"
    kind: str = "script"
    format: int = FORMAT

    @property
    def offloads(self) -> bool:
        """Whether its DeepSpeed config has the host's cores step the optimizer."""
        return offloads(self.ds_config or {})

    @property
    def title(self) -> str:
        """A name of the run for people."""
        return self.script if self.module else Path(self.script).name


AnyJob = Job | ScriptJob


def from_json(text: str, where: str, secrets: Sequence[tuple[KeyPath, str]] = ()) -> AnyJob:
    """The job of a job.json. Raises DsrunError where the text is not one (`where` names the file).

    secrets: values and places of what it hides. Without them the job is only good to look at.
    """
    hint = "It was changed by hand or written by another version of dsrun; start a new run instead."
    try:
        raw = json.loads(text)
        raw.pop("secrets", None)
        if raw.get("format") != FORMAT:
            raise DsrunError(
                f"has format {raw.get('format')!r}; this dsrun reads {FORMAT}: start a new run", where=where
            )
        for path, value in secrets:
            _put(raw, path, value)
        raw["hosts"] = tuple(
            HostDevices(h["host"], tuple(h["devices"]), tuple(h.get("visible", ()))) for h in raw["hosts"]
        )
        if raw.get("kind") == "script":
            return ScriptJob(**{**raw, "args": tuple(raw["args"])})
        raw["model"] = ModelSpec(**raw["model"])
        raw["data"] = _whole(DataSpec, raw["data"])
        raw["training"] = _whole(TrainingSpec, raw["training"])
        raw["prepared"] = Prepared(**{**raw["prepared"], "inputs": _inputs(raw["prepared"].get("inputs"))})
        raw["peft"] = _whole(PeftOptions, raw["peft"])
        raw["parallel"] = _whole(ParallelismOptions, raw["parallel"])
        raw["trackers"] = _whole(TrackerOptions, raw["trackers"])
        raw["fsdp"] = _whole(FsdpSpec, raw["fsdp"]) if raw.get("fsdp") else None
        return Job(**raw)
    except (ValueError, TypeError, LookupError, AttributeError, *BOUNDLESS) as error:
        raise DsrunError(f"is not a job file: {error}", where=where, hint=hint) from error


def _inputs(raw: dict[str, Any] | None) -> Inputs | None:
    return Inputs(raw["host"], tuple(InputFile(**file) for file in raw["files"])) if raw else None


def _whole(kind: type[T], values: dict[str, Any]) -> T:
    """Options from a file that must hold each of them: today's defaults may differ from those of its time."""
    if absent := {option.name for option in dataclasses.fields(kind)} - set(values):  # type: ignore[arg-type]
        raise KeyError(*sorted(absent))
    return kind(**values)


def read(path: Path) -> AnyJob:
    """A job.json with its secrets, to run the job. Raises DsrunError, also for a user who may not read them."""
    text = read_text_inside(path.parent, path.name)
    return from_json(text, str(path), _secrets(text, path.with_name(SECRETS)))


def read_shown(path: Path) -> AnyJob:
    """A job.json without its secrets, to look at."""
    return from_json(read_text_inside(path.parent, path.name), str(path))


KeyPath = list[str | int]
"""Keys and places in lists, from the outermost."""


def _divided(fields: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[KeyPath, str]]]:
    """A job's fields as others may see them, and the values that are hidden in those, with their places."""
    public = {name: shown_value(name, value) for name, value in fields.items()}
    if fields.get("kind") == "script":
        public |= {"args": shown_arguments(fields["args"]), "env": shown(fields["env"])}
    return public, list(_differing(fields, public))


def _differing(whole: Any, public: Any, path: Sequence[str | int] = ()) -> Iterator[tuple[KeyPath, str]]:
    """Texts of the first value that differ in the second, with their places."""
    if isinstance(whole, str):
        if whole != public:
            yield [*path], whole
    elif isinstance(whole, (dict, list, tuple)):
        for key, inside in whole.items() if isinstance(whole, dict) else enumerate(whole):
            yield from _differing(inside, public[key], [*path, key])


def _secrets(text: str, file: Path) -> list[tuple[KeyPath, str]]:
    """The values that a job.json hides, from the file beside it. Raises DsrunError, naming those that are missing."""
    try:
        public = json.loads(text)
        lacking = public.get("secrets") or []
    except (ValueError, AttributeError, *BOUNDLESS):
        return []  # from_json says what is wrong with it
    if not lacking:
        return []
    try:
        held = json.loads(read_text_inside(file.parent, file.name))
        if [path for path, _ in held] != lacking:  # values in the wrong places would start a broken script
            raise ValueError("it is another job's")
        return [(path, str(value)) for path, value in held]
    except (DsrunError, ValueError, TypeError, *BOUNDLESS) as error:
        names = (
            ", ".join(_in_words(public, path) for path in lacking)
            if isinstance(lacking, list)
            else str(lacking)
        )
        why = error.problems[0].what if isinstance(error, DsrunError) else str(error)
        hint = "Who started the run can go on with it. With values of your own, start it anew."
        raise DsrunError(
            f"{why}, so the values of {names} are lacking", where=str(file), hint=hint
        ) from error


def _in_words(public: Mapping[str, Any], path: Any) -> str:
    """A hidden value's name: the option of a script's argument, or the keys that lead to it."""
    if not isinstance(path, list):  # somebody has changed the file
        return str(path)
    if path[:1] == ["args"] and len(path) == 2:
        with suppress(LookupError, TypeError):
            words, place = [str(word) for word in public["args"]], int(path[1])
            if "=" in words[place] and "/" not in words[place]:
                return words[place].partition("=")[0]
            if place and words[place - 1].startswith("-"):
                return words[place - 1]
    return ".".join(map(str, path))


def _put(fields: Any, path: KeyPath, value: str) -> None:
    """Put a value in its place in a job's fields. Raises LookupError, TypeError or ValueError where there is none."""
    for key in path[:-1]:
        fields = fields[key]
    if HIDDEN not in fields[path[-1]]:
        raise ValueError(f"{path} hides nothing")
    fields[path[-1]] = value


def _only(job: AnyJob, kind: type[Job], where: str) -> Job:
    if not isinstance(job, kind):
        raise DsrunError("is a script's run, not a fine-tune", where=where)
    return job
