"""From what the user asked for to a job: everything is looked at here, before anything is started or written.

A `Draft` is the job as far as it is known. Each of the STEPS adds to it; a step that finds something wrong adds
problems instead, and the next steps look at what they can without it, so that the user hears of everything at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from dsrun import __version__, catalog
from dsrun.cluster.devices import Machine
from dsrun.config.build import BuiltConfig, Options, build_config
from dsrun.config.build import draft as unchecked_config
from dsrun.config.options import NVME_VARIABLE
from dsrun.config.preset_options import with_overrides, with_preset
from dsrun.data.cache import prepared_paths
from dsrun.data.conversations import AUTO, PROMPT_RESPONSE, TEXT, Columns, columns_of, named_format
from dsrun.data.hub_data import local_file
from dsrun.data.rows import check_data_file, format_of, unusable, weighted_file
from dsrun.data.sequence_lengths import MOST_CUT, ExampleLength, example_lengths, fitting
from dsrun.errors import DsrunError, Problem, collected
from dsrun.jobs.allocation.allocation import Allocation
from dsrun.jobs.allocation.request import DeviceRequest
from dsrun.jobs.allocation.reservation import Allocator, Preview
from dsrun.jobs.build import (
    SCORE_PACKAGES,
    TORCH_ADAM,
    JobDraft,
    PlannedJob,
    absent_packages,
    check_operators,
    check_trackers,
    go_through,
    precision_problems,
    why_torch_adam,
)
from dsrun.jobs.build.checks import disk_check, kernels, memory_check, optimizers
from dsrun.jobs.spec import run_folder
from dsrun.jobs.spec.job import (
    DataSpec,
    HostDevices,
    Job,
    ModelSpec,
    Prepared,
    TrainingSpec,
    node_shape,
    world_size_of,
)
from dsrun.models import chatglm, model_files, peft_methods, resolve
from dsrun.options import derived
from dsrun.options.commands import FinetuneOptions
from dsrun.options.groups import CONFIG, PeftOptions, TrackerOptions
from dsrun.options.table import Resolved, Source, flag_of, select
from dsrun.planner.plan import FITS, OUT
from dsrun.planner.shape import Shape, from_config

DATASETS = "presets/datasets"
LENGTHS = ("max_source_length", "max_target_length")
TRAINING_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "pyarrow", "psutil", "matplotlib")


@dataclass(frozen=True)
class FinetuneRequest:
    """What the user asked for."""

    model: str
    """A name from `dsrun models`, a Hugging Face folder or a GGUF file."""
    asked: Resolved[FinetuneOptions]
    """The options as the command line, the environment and a run file give them."""


class Files(NamedTuple):
    """Where the examples are."""

    train: tuple[Path, ...]
    evaluation: Path | None
    weights: tuple[float, ...] = ()
    """How often the examples of each training file are in an epoch."""

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file."""
        return self.train if self.evaluation is None else (*self.train, self.evaluation)


@dataclass(kw_only=True)
class Draft(JobDraft):
    """A fine-tune on its way."""

    name: str
    """MODEL."""
    asked: Resolved[FinetuneOptions]
    model: ModelSpec | None = None
    dataset: str | None = None
    """The data set that ships with the model."""
    files: Files | None = None
    kernels: kernels.Chosen = field(default_factory=kernels.Chosen)
    hosts: tuple[HostDevices, ...] = ()
    """With the devices of each, once they are known."""
    preset: str | None = None
    config: BuiltConfig | None = None
    optimizer_params: dict[str, Any] = field(default_factory=dict)
    prediction: dict[str, float | str] | None = None

    @property
    def options(self) -> FinetuneOptions:
        return self.asked.options

    @property
    def forced(self) -> bool:
        """Whether what will run out of memory is a note, not a problem: a dry run only says so."""
        return self.options.force or self.options.dry_run

    @property
    def peft(self) -> PeftOptions:
        return select(PeftOptions, self.options)

    @property
    def columns(self) -> Columns:
        options = self.options
        return columns_of(options)


def plan(
    request: FinetuneRequest,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    download: bool = True,
    allocator: Allocator | None = None,
) -> PlannedJob[Job]:
    """Check everything and return the job. Raises DsrunError with all the problems that can be found together.

    download: fetch a model from the hub once all the rest is right; else the job names the repository only. allocator:
    chooses the devices; unless given, they are not locked.
    """
    allocator = allocator or Preview(machine, environ)
    draft = Draft(
        name=request.model, asked=request.asked, machine=machine, environ=environ, allocator=allocator
    )
    go_through(draft, STEPS)
    return _finished(draft, download=download)


def config_of(
    request: FinetuneRequest, machine: Machine, environ: Mapping[str, str], *, gpus: int, nodes: int
) -> BuiltConfig:
    """The DeepSpeed config that the fine-tune would run on this machine's kind of devices, `gpus` on each host.

    Raises DsrunError where plan would, as far as that is not about the data, the devices or the folder.
    """
    draft = Draft(
        name=request.model, asked=request.asked, machine=machine, environ=environ,
        allocator=Preview(machine, environ),
    )  # fmt: skip
    go_through(draft, (find_model, settle_options, _choose_precision))
    if draft.problems:
        raise DsrunError(draft.problems)
    divide(draft, unnamed_hosts(gpus, nodes))
    _take_torch_adam(draft)
    config = _checked_config(draft)
    if draft.problems:
        raise DsrunError(draft.problems)
    return config


def take_adapter(draft: Draft) -> None:
    """What an adapter that is trained on says of itself: method, rank, length of the prefix."""
    draft.asked = peft_methods.with_adapter(draft.asked)


def find_model(draft: Draft) -> None:
    """The model, and the defaults that its file and its method bring."""
    draft.asked = derived.by_method(draft.asked)
    draft.model, defaults = resolve.resolve(draft.name, draft.options.model_path)
    draft.dataset = defaults.get("dataset")
    where = model_files.file_label(draft.model.name)
    method = draft.asked.filled(Source.MODEL_FILE, {"method": defaults.get("method")}, where).options.method
    own = derived.of_model_file({k: v for k, v in defaults.items() if k != "dataset"}, method)
    draft.asked = derived.by_method(draft.asked.filled(Source.MODEL_FILE, own, where))
    draft.asked = derived.by_size(draft.asked, _weights(draft.model))


def settle_options(draft: Draft) -> None:
    """What the environment, the preset, --set and the reference recipe say of the options."""
    nvme = {"nvme_path": draft.environ.get(NVME_VARIABLE) or None}
    draft.asked = draft.asked.filled(Source.ENVIRONMENT, nvme, NVME_VARIABLE)
    options = draft.options
    draft.asked = with_overrides(draft.asked, options.overrides)
    if options.preset != AUTO:
        draft.asked = with_preset(draft.asked, options.preset)
    draft.asked = derived.by_optimizer(derived.by_recipe(draft.asked))
    draft.preset = options.preset


def _check_model(draft: Draft) -> None:
    """Whether the model can be trained that way, and exported as asked."""
    export_format, peft = draft.options.export_format, draft.peft
    with collected(draft.problems):
        if draft.model:
            resolve.check_export_format(draft.model, export_format)
    draft.problems += [*peft_methods.check_export(peft, export_format), *peft_methods.check_packages(peft)]
    draft.problems += peft_methods.check_attention(peft, draft.options.attention)
    if draft.model:
        draft.problems += peft_methods.check_targets(peft, resolve.architecture(draft.model))


def check_data(draft: Draft) -> None:
    """The files and their first examples; without a model's name nobody knows what ships with it."""
    if draft.problems and not draft.options.train_file:
        return
    draft.files = files = data_files(draft.options, draft.dataset)
    columns, data_format = draft.columns, asked_format(draft.asked)
    problems = [problem for path in files.all for problem in check_data_file(path, columns, data_format)]
    if draft.options.strict_data and not problems:
        problems = [problem for path in files.all for problem in unusable(path, columns, data_format)]
    draft.problems += problems
    if draft.options.official and not problems:
        draft.problems += [
            Problem("has prompts and responses, no plain text", "--official", f"Leave it out, or {path}.")
            for path in files.all
            if format_of(path, columns, data_format) == TEXT
        ]


def settle_lengths(draft: Draft) -> None:
    """Tokens of prompts and responses: what is asked for, else what the examples need and the model has positions for.

    The reference recipe has its own. Where the tokenizer isn't here yet (a model that is still to be downloaded or
    made), this says so; what is cut is then looked at once more when the examples are prepared, before the start.
    """
    if draft.model is None or draft.files is None or draft.problems or draft.options.official:
        return
    folder = _tokenizer_folder(draft.model, _data_spec(draft, draft.files)[0])
    if folder is None:
        if Source.BUILT_IN in (draft.asked.source(name) for name in LENGTHS):
            now = f"{draft.options.max_source_length} + {draft.options.max_target_length}"
            draft.notes.append(
                f"lengths: {now} tokens, unless the model's tokenizer, once it is here, says otherwise"
            )
        return
    lengths = example_lengths(_data_spec(draft, draft.files)[0], folder)
    positions = _positions(draft.model)
    if lengths:
        fit = dict(zip(LENGTHS, fitting(lengths, positions), strict=True))
        draft.asked = draft.asked.filled(Source.DERIVED, fit, "what 99 % of the examples need")
    elif positions is not None:  # documents fill what there is
        most = {name: min(getattr(draft.options, name), positions // 2) for name in LENGTHS}
        draft.asked = draft.asked.filled(Source.DERIVED, most, "the model's positions")
    _check_lengths(draft, lengths, positions)


def _check_lengths(draft: Draft, lengths: Sequence[ExampleLength], positions: int | None) -> None:
    """What the lengths cut, and whether the model has positions for them."""
    allowed, flags = (
        draft.options.allow_truncation,
        " and ".join(flag_of(FinetuneOptions, name) for name in LENGTHS),
    )
    source, target = (getattr(draft.options, name) for name in LENGTHS)
    if positions is not None and source + target > positions:
        if not allowed:
            what = f"{source} + {target} tokens are more than the model's {positions} positions"
            hint = "Lower them, or have them lowered: --allow-truncation."
            draft.problems.append(Problem(what, flags, hint))
            return
        target = min(target, max(positions // 2, positions - source))
        source = positions - target
        draft.asked = draft.asked.settled(
            dict(zip(LENGTHS, (source, target), strict=True)), "the model's positions"
        )
    if not lengths:
        return
    cut = sum(one.cut(source, target) for one in lengths)
    share, longest = cut / len(lengths), max(one.prompt + one.response for one in lengths)
    says = (
        f"{cut:,} of {len(lengths):,} examples ({share:.1%}) are longer, the longest has {longest:,} tokens"
    )
    if share > MOST_CUT and not allowed:
        needed = " ".join(
            f"{flag_of(FinetuneOptions, name)} {tokens}"
            for name, tokens in zip(LENGTHS, fitting(lengths, None), strict=True)
        )
        what = f"prompts of {source} tokens and responses of {target}: {says}"
        hint = f"99 % need {needed}; --allow-truncation trains on what is left of them."
        draft.problems.append(Problem(what, flags, hint))
    elif draft.asked.source("max_source_length") == Source.DERIVED or cut:
        draft.notes.append(f"lengths: {source} tokens of a prompt, {target} of a response; {says}")


def _tokenizer_folder(model: ModelSpec, data: DataSpec) -> Path | None:
    """A folder with the model's tokenizer; None where there is none yet."""
    if model.source in ("folder", "chatglm"):
        folder = Path(model.location)
    elif model.source == "hub":
        return None
    else:
        folder = Path(_prepared(_with_corpus(model), data).model_dir)
    files = ("tokenizer.json", "tokenizer.model")
    return folder if any((folder / name).is_file() for name in files) else None


def _positions(model: ModelSpec) -> int | None:
    """The longest sequence that the model was made for, in tokens; None where its config says nothing."""
    found = resolve.architecture(model).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None


def _allocate(draft: Draft) -> None:
    """The devices of every host, and the precision that they do best."""
    draft.placed = draft.allocator.allocate(select(DeviceRequest, draft.options))
    draft.machine, draft.hosts = draft.placed.machine, draft.placed.hosts
    draft.notes += draft.placed.notes


def _choose_precision(draft: Draft) -> None:
    machine = _own_gpus(draft.machine, draft.placed)
    draft.asked = draft.asked.filled(
        Source.DERIVED, {"precision": machine.default_precision}, "what the devices do best"
    )
    draft.problems += precision_problems(draft.options.precision, machine.accelerator)


def _choose_kernels(draft: Draft) -> None:
    """Attention and the fused loss, by the devices and the network."""
    if draft.model and draft.placed:
        devices = kernels.devices_of(draft.machine, draft.placed.devices, known=draft.placed.known)
        kind = resolve.architecture(draft.model).get("model_type")
        if kind == chatglm.MODEL_TYPE:  # of a repository that is not downloaded yet
            kind = chatglm.NETWORK
        draft.kernels = kernels.chosen(draft.options, devices, kind, str(draft.options.precision))


def _build_config(draft: Draft) -> None:
    """The preset, chosen if it is left to dsrun; the DeepSpeed config; and whether it fits."""
    if draft.preset is None:
        return  # it can't be read, which is said already
    if draft.preset == AUTO:
        split = derived.by_devices(draft.asked, _ranks(draft))
        if (request := _memory_request(replace(draft, asked=split))) is None:
            return
        _choose_preset(draft, request)
    divide(draft, draft.hosts)
    request = _memory_request(draft)
    _take_torch_adam(draft)
    draft.config = config = _checked_config(draft)
    if request and draft.placed and draft.placed.known:
        _check_memory(draft, request, config)


def _take_torch_adam(draft: Draft) -> None:
    """torch's AdamW where DeepSpeed's can't be compiled, or needn't be."""
    if why := _why_torch_adam(draft):
        overrides = (*draft.options.overrides, TORCH_ADAM)
        draft.asked = draft.asked.filled(Source.COMMAND_LINE, {"overrides": overrides}, why)
        if draft.machine.accelerator == "cuda":
            draft.notes.append(
                f"{why}, so torch's AdamW takes the place of DeepSpeed's fused one ({TORCH_ADAM})"
            )


def _checked_config(draft: Draft) -> BuiltConfig:
    """The DeepSpeed config, and what can be said against it without knowing how much memory there is."""
    config = build_config(str(draft.preset), config_options(draft))
    accelerator = draft.machine.accelerator
    draft.problems += peft_methods.check_device(draft.peft, accelerator, config.ds_config)
    optimizer, shape = draft.options.optimizer, _shape(draft.model)
    if refused := optimizers.refusals(config.ds_config, accelerator, str(draft.preset), optimizer):
        raise DsrunError(refused)
    config, draft.optimizer_params = optimizers.with_optimizer(
        config, optimizer, shape.hidden if shape else None
    )
    optimizers.check_schedule(config.ds_config, draft.asked)
    return config


def _choose_preset(draft: Draft, request: memory_check.MemoryRequest) -> None:
    """--preset auto: the fastest that fits."""
    if draft.placed and not draft.placed.known:
        hint = "Name a preset: `dsrun preset` lists them."
        raise DsrunError("can't choose: the hosts are not asked", where="--preset auto", hint=hint)
    options = draft.options
    nvme = options.nvme_path is not None
    draft.preset, why = memory_check.chosen_preset(
        request, draft.machine, options.overrides, nvme=nvme, force=draft.forced
    )
    draft.notes.append(why)
    draft.asked = with_preset(draft.asked, draft.preset)


def _why_torch_adam(draft: Draft) -> str:
    if draft.options.optimizer != optimizers.ADAMW:
        return ""
    config = unchecked_config(str(draft.preset), config_options(draft))
    return why_torch_adam(config, draft.machine.accelerator)


def _check_memory(draft: Draft, request: memory_check.MemoryRequest, config: BuiltConfig) -> None:
    """What the job is predicted to take; a problem if that is too much."""
    preset = str(draft.preset)
    found = memory_check.check(request, config.ds_config, preset, draft.machine)
    if found is None:
        draft.notes.append(f"memory is not predicted: the planner doesn't know the shape of {request.name}")
        return
    planned, draft.prediction = found
    if planned.verdict == FITS:
        return
    if planned.verdict == OUT and not draft.forced:
        raise DsrunError([memory_check.refusal(planned, draft.machine, request)])
    if planned.verdict == OUT:
        says = f"preset {preset} will run out of memory ({planned.reason}): without --force it is not started"
    else:
        says = f"preset {preset} is {planned.verdict} ({planned.reason})"
    draft.notes.append(says)


def _check_folder(draft: Draft) -> None:
    """The run's folder is new, and what the ranks import is installed."""
    run_dir = draft.options.output_dir or _default_run_dir(draft.name, str(draft.preset))
    draft.asked = draft.asked.filled(Source.DERIVED, {"output_dir": run_dir}, "model, preset and time")
    scored = draft.options.generate_rows > 0 and bool(draft.files and draft.files.evaluation)
    draft.problems += [*run_folder.check_new(run_dir), *check_packages(scored=scored)]
    asked = select(TrackerOptions, draft.options)
    draft.problems += check_trackers(asked, draft.environ, draft.allocator.connection)


STEPS = (
    take_adapter, find_model, settle_options, _check_model, check_data, settle_lengths, _allocate, _choose_precision,
    _choose_kernels, _build_config, _check_folder,
)  # fmt: skip
"""In this order: each knows what those before it found out."""


def _finished(draft: Draft, *, download: bool) -> PlannedJob[Job]:
    """The job. Raises DsrunError with what is wrong with the draft, or with the disk, or with what must be compiled."""
    model, config, files, placed = draft.model, draft.config, draft.files, draft.placed
    if draft.problems or model is None or config is None or files is None or placed is None:
        raise DsrunError(draft.problems)
    if model.source == "hub" and download:
        model = resolve.downloaded(model)
        resolve.check_export_format(
            model, draft.options.export_format
        )  # what a repository holds is known now
        draft.model = model
        settle_lengths(draft)
        if (request := _memory_request(draft)) and placed.known and not draft.problems:
            _check_memory(draft, request, config)
        if draft.problems:
            raise DsrunError(draft.problems)
    model = _with_corpus(model)
    data, formats = _data_spec(draft, files)
    options = draft.options
    job = Job(
        run_dir=str(Path(str(options.output_dir)).absolute()),
        model=model,
        data=data,
        training=select(
            TrainingSpec, options, optimizer_params=draft.optimizer_params, liger=draft.kernels.liger
        ),
        preset=str(draft.preset),
        precision=str(options.precision),
        accelerator=draft.machine.accelerator,
        hosts=placed.hosts,
        ds_config=config.ds_config,
        prepared=_prepared(model, data),
        dsrun_version=__version__,
        prediction=draft.prediction,
        launcher=placed.launcher,
        peft=draft.peft,
        trackers=select(TrackerOptions, options),
    )
    if full := disk_check.check(job):
        raise DsrunError(full)
    check_operators(job.ds_config, job.accelerator, draft.environ)
    warnings = [
        f"{finding.rule} {finding.path}: {finding.message}. {finding.suggestion}".rstrip(". ") + "."
        for finding in config.findings
    ]
    notes = (*draft.notes, *formats, *warnings)
    return PlannedJob(job, notes, draft.asked)


def _own_gpus(machine: Machine, placed: Allocation | None) -> Machine:
    """The machine with the job's GPUs alone, where it is known which they are: of several kinds others don't count."""
    chosen = placed.devices if placed and placed.known else ()
    own = tuple(gpu for gpu in machine.gpus if gpu.index in chosen)
    return replace(machine, gpus=own) if own else machine


def _memory_request(draft: Draft) -> memory_check.MemoryRequest | None:
    if draft.model is None or draft.placed is None:
        return None
    options = draft.options
    return memory_check.MemoryRequest(
        architecture=resolve.architecture(draft.model),
        name=draft.model.name,
        devices=draft.placed.devices,
        nodes=len(draft.placed.hosts),
        precision=str(options.precision),
        seq_len=options.max_source_length + options.max_target_length + options.official,
        micro_batch=options.micro_batch,
        grad_accum=options.micro_steps,
        checkpointing=options.gradient_checkpointing,
        peft=draft.peft,
        optimizer=options.optimizer,
        fused_loss=draft.kernels.liger,
        flash=not kernels.keeps_scores(options.attention, resolve.architecture(draft.model)),
    )


def divide(draft: Draft, hosts: tuple[HostDevices, ...]) -> None:
    """The optimizer step over these devices. Raises DsrunError where it can't be divided by them."""
    draft.hosts = hosts
    draft.asked = derived.by_devices(draft.asked, _ranks(draft))


def unnamed_hosts(gpus: int, nodes: int) -> tuple[HostDevices, ...]:
    """Hosts with `gpus` devices each, of which nothing else is known."""
    return tuple(HostDevices(f"host{number}", tuple(range(gpus))) for number in range(nodes))


def _ranks(draft: Draft) -> int:
    """1 where the devices can't be had, which is said already."""
    return world_size_of(draft.hosts) or 1


def config_options(draft: Draft) -> Options:
    ranks, nodes = node_shape(draft.hosts) if draft.hosts else (1, 1)
    origins = {name: str(origin) for name, origin in draft.asked.origins.items()}
    return select(
        Options, draft.options, gpus=ranks, nodes=nodes, target="deepspeed", origins=origins,
        largest_parameter=_largest_parameter(draft.model), own_schedule=draft.options.lr_schedule != CONFIG,
    )  # fmt: skip


def _shape(model: ModelSpec | None) -> Shape | None:
    """None where it isn't known yet, or not one that dsrun plans for."""
    if model is None:
        return None
    try:
        return from_config(resolve.architecture(model), model.name)
    except DsrunError:
        return None


def _largest_parameter(model: ModelSpec | None) -> int | None:
    """Elements of the largest weight."""
    shape = _shape(model)
    return shape.largest if shape else None


def _weights(model: ModelSpec | None) -> float | None:
    shape = _shape(model)
    return shape.parameters if shape else None


def data_files(options: FinetuneOptions, dataset: str | None) -> Files:
    """The training and evaluation files; the model's own data set where the user names no file."""
    evaluation = local_file(options.eval_file, "--eval-file") if options.eval_file else None
    if options.train_file:
        found = [weighted_file(text) for text in options.train_file]
        if any(weight == 0 for _, weight in found):
            hint = "FILE:2 takes each example twice."
            raise DsrunError("a weight has to be more than 0", where="--train-file", hint=hint)
        weights = tuple(weight for _, weight in found)
        plain = all(weight == 1 for weight in weights)
        files = tuple(local_file(path, "--train-file") for path, _ in found)
        return Files(files, evaluation, () if plain else weights)
    if dataset is None:
        raise DsrunError(
            "this model ships without data",
            hint="Name a file: --train-file data.jsonl (JSONL, JSON, CSV or Parquet)",
        )
    folder = dataset_folder(dataset)
    return Files((folder / "train.jsonl",), evaluation or folder / "dev.jsonl")


def dataset_folder(name: str) -> Path:
    """The folder of a shipped data set, presets/datasets/NAME."""
    for folder in catalog.folders(DATASETS):
        if (folder / name / "train.jsonl").is_file():
            return folder / name
    raise DsrunError(f"there is no data set {name!r} in {DATASETS}", hint="Is the installation complete?")


def asked_format(asked: Resolved[FinetuneOptions]) -> str:
    """The format that the user names, by name or by naming its columns; else AUTO."""
    return named_format(asked.options.data_format, asked.user)


def _data_spec(draft: Draft, files: Files) -> tuple[DataSpec, list[str]]:
    """The data, and a line for each file whose format was found out and is not the plainest."""
    data_format = asked_format(draft.asked)
    found = [format_of(path, draft.columns, data_format) for path in files.all]
    notes = [
        f"{path} is read as {kind} (--data-format decides otherwise)"
        for path, kind in dict(zip(files.all, found, strict=True)).items()
        if kind not in (data_format, PROMPT_RESPONSE)
    ]
    first, *more = map(str, files.train)
    spec = select(
        DataSpec,
        draft.options,
        train_file=first,
        eval_file=str(files.evaluation) if files.evaluation else None,
        more_files=tuple(more),
        weights=files.weights,
        data_format=found[0] if len(set(found)) == 1 else data_format,
    )
    return spec, notes


def _with_corpus(model: ModelSpec) -> ModelSpec:
    """A model that is made here learns its tokenizer from a shipped data set: the name becomes a folder."""
    if model.source != "random":
        return model
    corpus = str(dataset_folder(model.tokenizer["dataset"]))
    return replace(model, tokenizer={**model.tokenizer, "corpus": corpus})


def _prepared(model: ModelSpec, data: DataSpec) -> Prepared:
    try:
        return prepared_paths(model, data)
    except OSError as error:
        raise DsrunError(f"can't be read: {error.strerror}", where=str(error.filename)) from error


def _default_run_dir(model: str, preset: str) -> Path:
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{Path(model).name}-{Path(preset).stem}-{now}"


def scores(job: Job) -> bool:
    """Whether held-out prompts are answered and compared."""
    return bool(job.data.eval_file) and job.training.generate_rows > 0


def check_packages(*, scored: bool) -> list[Problem]:
    """What a fine-tune's ranks need and is not installed. scored: held-out prompts are answered and compared."""
    return absent_packages((*TRAINING_PACKAGES, *(SCORE_PACKAGES if scored else ())), "training")
