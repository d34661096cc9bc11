"""The forms of what commands print with --json: their types, as Python says them.

A form's version is in dsrun/json_outputs.py, its JSON Schema is made by tools/json_schemas.py. What dsrun has as a
dataclass is that dataclass; what it makes as a dict is a TypedDict here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

from dsrun.cli.explain import NameExplanation
from dsrun.config.compare import Difference
from dsrun.config.presets.explain import ExplainedKey
from dsrun.job.health import Health
from dsrun.jobs.diagnosis.diagnosis import Diagnosis
from dsrun.jobs.runs.calibration import DeviceCalibration
from dsrun.jobs.runs.compare_runs import Agreement
from dsrun.jobs.runs.run_summaries import Summary

Object = dict[str, Any]
Bytes = Annotated[float | None, "bytes"]
Seconds = Annotated[float | None, "seconds"]


class Model(TypedDict):
    """A model as a run has it."""

    name: str
    source: Annotated[str, "random, folder, chatglm, gguf or hub"]
    location: str


class HostOfRun(TypedDict):
    """A host and its devices, in the order of the ranks."""

    host: str
    devices: list[int]
    visible: Annotated[list[str], "what CUDA calls them, where that isn't their numbers"]


class Ends(TypedDict):
    """A curve's first and last value."""

    first: float
    last: float


class StepLoss(TypedDict):
    """An evaluation."""

    step: int
    loss: float


class Took(TypedDict):
    """What a run took: the most of its ranks, and of a node."""

    gpu_allocated_bytes: Bytes
    gpu_reserved_bytes: Bytes
    host_bytes: Bytes
    step_seconds: Seconds


class CheckpointOfRun(TypedDict):
    """A checkpoint's folder, looked at by its mark and the sizes of its files."""

    step: int
    path: str
    state: Annotated[str, 'in words: "whole", "is damaged: ...", "incomplete: ...", ...']
    damaged: bool


class Show(TypedDict):
    """A fine-tune's run in full."""

    path: str
    state: str
    why: str | None
    problems: list[str]
    diagnosis: Annotated[Object | None, "as of `dsrun diagnose --json`, without a version"]
    model: Model
    data: Annotated[Object, "as in job.json"]
    training: Annotated[Object, "as in job.json"]
    peft: Annotated[Object, "as in job.json"]
    parallel: Annotated[Object, "as in job.json"]
    preset: str
    zero_stage: Annotated[int | None, "null with FSDP"]
    fsdp: Annotated[Object | None, "as in job.json; null with DeepSpeed"]
    precision: str
    accelerator: Literal["cuda", "cpu"]
    host: str | None
    hosts: list[HostOfRun]
    ranks: int
    micro_batch: int
    grad_accum: int
    dsrun_version: str
    started: Annotated[float | None, "seconds since 1970"]
    seconds: Seconds
    launches: int
    steps: int
    total_steps: int | None
    checkpoints: list[CheckpointOfRun]
    loss: Ends | None
    eval_losses: list[StepLoss]
    scores: dict[str, dict[str, float]]
    skipped_steps: int | None
    tokens_per_second: float | None
    health: Health | None
    predicted: Annotated[Object | None, "as `prediction` in job.json"]
    measured: Took | None
    rank_0_memory_bytes: Bytes
    places: Annotated[dict[str, str | list[str]], "what lies where, of what is there"]
    commands: Annotated[dict[str, str], "purpose: the command"]


class ShowScript(TypedDict):
    """A script's run in full."""

    path: str
    state: str
    why: str | None
    problems: list[str]
    diagnosis: Annotated[Object | None, "as of `dsrun diagnose --json`, without a version"]
    script: str
    module: bool
    args: list[str]
    python: Annotated[Any, "as in job.json"]
    cwd: str
    preset: str | None
    accelerator: Literal["cuda", "cpu"]
    host: str | None
    hosts: list[HostOfRun]
    launcher: str
    ranks: int
    dsrun_version: str
    started: Annotated[float | None, "seconds since 1970"]
    seconds: Seconds
    restarts: int
    places: Annotated[dict[str, str | list[str]], "what lies where, of what is there"]
    commands: Annotated[dict[str, str], "purpose: the command"]


class Runs(TypedDict):
    """The runs, newest first."""

    runs: list[Summary]


class Compare(TypedDict):
    """Runs side by side. Lists have an entry for each run, in the order of `runs`; null where one has none."""

    runs: Annotated[list[str], "their folders"]
    config: Annotated[dict[str, list[Any]], "keys of ds_config that differ"]
    settings: Annotated[dict[str, list[Any]], "what else differs"]
    losses: Annotated[list[dict[str, float]], "of each run: optimizer step: training loss"]
    eval_losses: Annotated[list[dict[str, float]], "of each run: optimizer step: evaluation loss"]
    scores: dict[str, list[float | None]]
    figures: dict[str, list[float | None]]
    agreement: Annotated[list[Agreement], "of each run but the first, with the first"]


class FindingRow(TypedDict):
    """Something wrong in a config."""

    file: str
    line: Annotated[int, "from 1"]
    column: Annotated[int, "from 1, in characters"]
    path: Annotated[str, "of the key: $.zero_optimization.stage"]
    rule: str
    severity: Literal["error", "warning", "note"]
    message: str
    suggestion: str
    effect: Annotated[Literal["refused", "fails", "differs"] | None, "of an error, what comes of it"]
    fix: Literal["safe", "unsafe"] | None


class Validate(TypedDict):
    """Everything that is wrong with some configs."""

    findings: list[FindingRow]


class BisectCulprit(TypedDict):
    """A package that it takes, and the two releases between which it changes."""

    package: str
    last_right: str
    first_wrong: str
    untold: list[str]
    """Releases between these two of which it can't be told."""


class Bisect(TypedDict):
    """What makes the difference between two sets of versions."""

    culprits: list[BisectCulprit]
    """All of them are needed together."""
    others: dict[str, str]
    """Package -> version, of those that make no difference."""
    tried: int
    """Sets of versions that were asked."""
    says: str
    """The line of the first wrong one."""
    entry: str
    """An entry for presets/versions/."""


class Diff(TypedDict):
    """The keys in which two configs differ."""

    differences: list[Difference]


class ModelRow(TypedDict):
    """A model that is known by name. Sizes are those of its text part: context in tokens, experts of one block."""

    name: str
    parameters: int
    summary: str
    repository: str | None
    network: str | None
    context: int | None
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    experts: int | None
    experts_per_token: int | None
    prompt_format: str
    licence: str | None
    source: str | None
    file: str


class Models(TypedDict):
    """The models that can be fine-tuned by name."""

    models: list[ModelRow]


class PresetRow(TypedDict):
    """A preset."""

    name: str
    summary: str
    file: str


class Presets(TypedDict):
    """The presets."""

    presets: list[PresetRow]


class ImportedArgument(TypedDict):
    """An argument of another trainer's file, and what became of it."""

    name: str
    value: Any
    line: Annotated[int | None, "null: of a command line, or nobody's"]
    kind: Annotated[str, "same, anyway, left out, differs or unknown"]
    text: Annotated[str, "the option, or why there is none"]


ImportedOption = TypedDict("ImportedOption", {"value": Any, "from": str})
"""An option of the run file, and the argument that it is of."""


class Import(TypedDict):
    """Another trainer's file as a run file."""

    trainer: str
    release: Annotated[str, "the release whose arguments are known"]
    model: str | None
    options: dict[str, ImportedOption]
    arguments: list[ImportedArgument]
    notes: list[str]


class PresetExplain(TypedDict):
    """Each key of a config, who gave it and what it does."""

    keys: list[ExplainedKey]


class DoctorHost(TypedDict):
    """A host that was asked."""

    host: str
    slots: int | None
    facts: Annotated[Object | None, "what the probe found"]
    fault: Annotated[str | None, "why it could not be asked"]


class DoctorResult(TypedDict):
    """A check's verdict on a host."""

    check: str
    host: str
    colour: Annotated[str, "green, yellow, red or grey"]
    what: str
    fix: str


class Doctor(TypedDict):
    """What the hosts have, and what that means for a job."""

    hosts: list[DoctorHost]
    results: list[DoctorResult]
    smoke: NotRequired[Annotated[Object, "with --smoke"]]


class HostSlots(TypedDict):
    """A line of a hostfile."""

    host: str
    slots: int


class HostFinding(TypedDict):
    """Something wrong in a hostfile."""

    line: int
    rule: str
    severity: str
    message: str
    hint: str
    """What would be right."""


class HostsCheck(TypedDict):
    """A hostfile as DeepSpeed reads it."""

    hosts: list[HostSlots]
    findings: list[HostFinding]


class PlanModel(TypedDict):
    """The model of a plan; the other keys are its shape."""

    name: str
    parameters: int


class PlanOfGpu(TypedDict):
    """A GPU's memory."""

    by: Annotated[str, "trace, or formula where there is none"]
    needed_bytes: float
    allocated_bytes: float
    formula_allocated_bytes: float
    reserved_bytes: float
    nvidia_smi_bytes: float
    peak_at: Annotated[str, "the moment of the peak"]
    peaks: dict[str, float]
    at_peak: Annotated[dict[str, float], "what is there at the peak"]
    terms: Annotated[Object, "docs/reference/planner-terms.md"]


class PlanOfHost(TypedDict):
    """A node's memory."""

    peak_bytes: float
    peaks: dict[str, float]
    terms: Object


class PlanSpeed(TypedDict):
    """What a step takes."""

    seconds_per_step: float
    tokens_per_second: float
    terms: Object


class PlanRow(TypedDict):
    """A preset's plan."""

    preset: str
    verdict: str
    chance: Annotated[float, "that it fits, from 0 to 1"]
    used: Annotated[float, "share of the memory"]
    reason: str
    largest_micro_batch: int | None
    gpu: PlanOfGpu
    host: PlanOfHost
    nvme_bytes: Bytes
    checkpoint_bytes: Bytes
    speed: PlanSpeed
    setup: Object


class Plan(TypedDict):
    """What a fine-tune takes with each preset, the best first."""

    model: PlanModel
    place: str
    trainer: Annotated[str, "who trains: presets/trainers"]
    plans: list[PlanRow]
    skipped: Annotated[dict[str, str], "preset: why"]
    advice: Object | None
    usual: Annotated[list[Object], "the best plan on usual GPUs, each a plan with `gpus`"]
    cost: Object | None
    notes: list[str]
    knobs: Annotated[list[Object], "what makes the first plan safe, where it is tight"]
    lengths: Annotated[list[Object], "with --lengths: memory by the tokens of an example"]
    timeline: Annotated[list[Object], "with --timeline: a step's memory"]
    cards: Annotated[list[Object], "with --card: the same on other GPUs"]


class TuneTrial(TypedDict):
    """A trial of a search."""

    candidate: str
    knobs: dict[str, str]
    steps: int
    planned_seconds: float
    seconds: Annotated[float | None, "of a step; null where it died"]
    reason: str
    out_of_memory: bool
    noise: Annotated[float, "relative standard deviation of the seconds"]


class TuneRefused(TypedDict):
    """A candidate that finetune doesn't start."""

    name: str
    reason: str


class Tune(TypedDict):
    """What came of a search for the fastest settings."""

    preset: Annotated[str | None, "the file; null where every trial died"]
    knobs: dict[str, str]
    seconds_per_step: float | None
    sure: Annotated[bool, "whether no other candidate may be faster, as far as the trials tell"]
    trials: list[TuneTrial]
    refused: list[TuneRefused]


class PlanLayouts(TypedDict):
    """Ways to divide a model, the best first."""

    model: str
    place: str
    layouts: list[Object]
    notes: list[str]


class PlanInferenceRow(TypedDict):
    """A width of weights."""

    width: str
    bytes: float
    terms: dict[str, float]
    longest_context: int
    verdict: str
    host_bytes: float


class PlanInference(TypedDict):
    """What answering takes."""

    model: str
    place: str
    seq_len: int
    batch: int
    beams: int
    inference: list[PlanInferenceRow]


class PlanCalibrate(TypedDict):
    """What finished runs say of the planner's constants."""

    file: str
    devices: list[DeviceCalibration]


class BestStep(TypedDict):
    """The lowest evaluation loss, and the model that --keep-best kept."""

    step: int
    loss: float
    model: str | None


class Finetune(TypedDict):
    """What came of a fine-tune: docs/reference/finetune.md has the fields in words."""

    run_dir: str
    model: str
    steps: int
    loss: float | None
    best: BestStep | None
    eval_loss: Ends | None
    perplexity: Ends | None
    scores: dict[str, dict[str, float]]
    template_args: Annotated[dict[str, Any], "variables with which the chat template asks as in training"]
    answered: Annotated[dict[str, dict[str, int | None]], "at each time: rows answered, and of how many"]
    worse: Annotated[bool, "whether the loss ended above where it began"]
    example_prompt: Annotated[Any, "the prompt whose answers were shown, or null"]
    skipped_steps: int | None
    predicted: Annotated[Object | None, "as `prediction` in job.json"]
    measured: Took
    pushed: NotRequired[Annotated[str, "with --push: the commit's address"]]
    push_failed: NotRequired[Annotated[str, "with --push: why the model is not on the Hub"]]


class Launch(TypedDict):
    """What came of a script."""

    run_dir: str
    ranks: int
    seconds: float
    restarts: int
    logs: Annotated[str, "the folder"]


class RankPlace(TypedDict):
    """Where a rank runs; the other keys depend on the devices."""

    rank: int
    host: str


class OptionValue(TypedDict("OptionValue", {"from": str})):
    """An option's value, and who gave it (`from`)."""

    value: Any


class DryRun(TypedDict):
    """What would run."""

    job: Annotated[Object, "as job.json"]
    ranks: list[RankPlace]
    environment: Annotated[dict[str, str], "on top of yours; secrets are hidden"]
    forwarded: Annotated[dict[str, str], "of yours, to other hosts"]
    commands: list[list[str]]
    resume_from: str | None
    options: dict[str, OptionValue]


class Explain(TypedDict):
    """Every option of a fine-tune."""

    options: dict[str, OptionValue]


class Detached(TypedDict):
    """A job that goes on without the terminal."""

    run_dir: str
    log: str
    pid: int
    before: Annotated[int, "bytes of the log that are of earlier attempts"]


class Export(TypedDict):
    """What was written of a checkpoint."""

    run: str
    checkpoint: str | None
    folders: Annotated[dict[str, str], "kind: folder"]
    weights: NotRequired[Annotated[int, "how many there were"]]
    pushed: NotRequired[Annotated[str, "the commit's address"]]


class Evaluate(TypedDict):
    """How a model does on some rows; the other keys are those of docs/howto/chat.md."""

    model: str
    eval_file: str
    rows: int
    eval_loss: float | None
    target_tokens: int
    scores: dict[str, float]
    answered: int
    predictions: str | None
    decoding: Object
    device: Annotated[Any, "which one"]
    precision: str
    seconds: float


class Examples(TypedDict):
    """The first training examples, without training."""

    examples: Annotated[
        list[Object], "row, tokens, trained_on, and parts: text, and whether it is trained on"
    ]
    left_out: Annotated[list[Object], "row and why"]


class Submit(TypedDict):
    """A job that was sent to Slurm."""

    job_id: str
    run_dir: str
    script: str
    log: str
    nodes: int
    gpus_per_node: int
    time_limit_min: int | None


class SubmitScript(TypedDict):
    """What would be sent to Slurm."""

    run_dir: str
    command: list[str]
    script: Annotated[str, "its text"]


class SubmitManifest(TypedDict):
    """What Kubernetes gets."""

    run_dir: str
    file: str | None
    manifest: Object


class Form(NamedTuple):
    """A form of --json."""

    commands: tuple[str, ...]
    shape: type


FORMS = {
    "runs": Form(("dsrun runs",), Runs),
    "show": Form(("dsrun show RUN",), Show),
    "show-script": Form(("dsrun show RUN (of a script)",), ShowScript),
    "compare": Form(("dsrun compare RUN RUN",), Compare),
    "diagnose": Form(("dsrun diagnose LOG",), Diagnosis),
    "validate": Form(("dsrun validate FILE",), Validate),
    "bisect": Form(("dsrun bisect",), Bisect),
    "diff": Form(("dsrun diff A B",), Diff),
    "models": Form(("dsrun models",), Models),
    "presets": Form(("dsrun preset",), Presets),
    "preset-explain": Form(("dsrun preset NAME --explain",), PresetExplain),
    "import": Form(("dsrun import FILE",), Import),
    "plan": Form(("dsrun plan MODEL",), Plan),
    "tune": Form(("dsrun tune MODEL",), Tune),
    "plan-layouts": Form(("dsrun plan MODEL --layouts",), PlanLayouts),
    "plan-inference": Form(("dsrun plan MODEL --for inference",), PlanInference),
    "plan-calibrate": Form(("dsrun plan --calibrate RUN",), PlanCalibrate),
    "finetune": Form(("dsrun finetune", "dsrun resume", "dsrun rerun"), Finetune),
    "launch": Form(("dsrun launch", "dsrun rerun (of a script)"), Launch),
    "dry-run": Form(("dsrun finetune --dry-run", "dsrun launch --dry-run"), DryRun),
    "explain": Form(("dsrun finetune --explain",), Explain),
    "explanation": Form(("dsrun explain NAME",), NameExplanation),
    "detached": Form(("dsrun finetune --detach", "dsrun launch --detach"), Detached),
    "export": Form(("dsrun export RUN",), Export),
    "evaluate": Form(("dsrun evaluate MODEL",), Evaluate),
    "examples": Form(("dsrun finetune --show-examples N",), Examples),
    "submit": Form(("dsrun submit",), Submit),
    "submit-script": Form(("dsrun submit --dry-run",), SubmitScript),
    "submit-manifest": Form(("dsrun submit (Kubernetes)",), SubmitManifest),
    "doctor": Form(("dsrun doctor",), Doctor),
    "hosts-check": Form(("dsrun hosts check FILE",), HostsCheck),
}

OPEN_ENDED = (PlanModel, RankPlace, Evaluate)
"""Objects with keys that depend on what they are about."""
