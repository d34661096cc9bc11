"""From what the user asked for to a Job: everything is looked at here, before anything is started or written."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dsrun import __version__, catalog
from dsrun.cluster import extensions
from dsrun.cluster.devices import Machine
from dsrun.config.build import BuiltConfig, Options, build_config
from dsrun.config.options import NVME_VARIABLE
from dsrun.errors import DsrunError, Problem, collected
from dsrun.jobs import fitting, models, run_folder, space
from dsrun.jobs.cache import cache_root, prepared_paths
from dsrun.jobs.claims import Look, Take
from dsrun.jobs.defaults import DEFAULTS
from dsrun.jobs.job import DataSpec, Job, ModelSpec, Prepared, TrainingSpec
from dsrun.jobs.placed import Placed, Wanted
from dsrun.planner.plan import FITS, OUT
from dsrun.planner.shape import from_config
from dsrun.rows import check_data_file

DATASETS = "presets/datasets"
NAME_ONE = "Name a preset: `dsrun preset` lists them."
TRAINING_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "pyarrow", "psutil")


@dataclass(frozen=True)
class Request:
    """What the user gave. given: option name (with underscores) -> value, only for options that were given."""

    model: str
    given: Mapping[str, Any]
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """A job that passed every check, and what is worth saying about it. notes: lines for the user."""

    job: Job
    config: BuiltConfig
    notes: tuple[str, ...]


class Settings:
    """Values by name; the nearest wins: what the user gave, the model file's defaults, dsrun's defaults."""

    def __init__(self, given: Mapping[str, Any], model_defaults: Mapping[str, Any], where: str) -> None:
        for name in model_defaults:
            if name not in DEFAULTS and name != "dataset":
                hint = catalog.suggestion(name, DEFAULTS, "")
                raise DsrunError(f"[defaults]: unknown key {name!r}", where=where, hint=hint)
        self._layers = (given, model_defaults, DEFAULTS)

    def __getitem__(self, name: str) -> Any:
        return next((layer[name] for layer in self._layers if name in layer), None)


def plan(
    request: Request,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    download: bool = True,
    force: bool = False,
    take: Take | None = None,
) -> Planned:
    """Check everything and return the job. Raises DsrunError with all the problems that can be found together.

    download: fetch a model from the hub once all the rest is right; else the job names the repository only.
    force: what will run out of memory is a note, not a problem. take: takes the devices; unless given, they are chosen
    and not held.
    """
    given = request.given
    problems: list[Problem] = []
    spec: ModelSpec | None = None
    settings = Settings(given, {}, "")
    files: tuple[Path, Path | None] | None = None
    placed: Placed | None = None
    config: BuiltConfig | None = None
    prediction: dict[str, float | str] | None = None
    notes: list[str] = []
    with collected(problems):
        spec, defaults = models.resolve(request.model, given.get("model_path"))
        settings = Settings(given, defaults, f"model {request.model}")
    with collected(problems):
        if not problems or "train_file" in given:
            files = _data_files(given, settings)
            problems += _check_data(*files, settings)
    with collected(problems):
        placed = (take or Look(machine, environ))(Wanted.of(given))
        machine = placed.machine
        notes += placed.notes
    precision = given.get("precision") or machine.default_precision
    preset = settings["preset"]
    with collected(problems):
        wish = _wish(spec, settings, placed, precision) if spec and placed else None
        if preset == fitting.AUTO and wish:
            if placed and not placed.known:
                raise DsrunError(
                    "can't choose: the hosts are not asked", where="--preset auto", hint=NAME_ONE
                )
            nvme = given.get("nvme_path") is not None or bool(environ.get(NVME_VARIABLE))
            preset, why = fitting.chosen_preset(wish, machine, request.overrides, nvme=nvme, force=force)
            notes.append(why)
        overrides, said = _overrides(request.overrides, machine, given, settings, preset)
        notes += said
        ranks, nodes = _ranks(placed, given)
        options = replace(_options(given, settings, ranks, precision, overrides), nodes=nodes)
        options = replace(options, largest_parameter=_largest_parameter(spec))
        config = build_config(preset, options) if preset != fitting.AUTO else None
        if config and wish and placed and placed.known:
            prediction, found, told = _fit(wish, config, preset, machine, force=force)
            problems += found
            notes += told
    run_dir = given.get("output_dir") or _default_run_dir(request.model, preset)
    problems += run_folder.check_new(run_dir)
    problems += check_packages()
    if problems or spec is None or config is None or files is None or placed is None:
        raise DsrunError(problems)
    if spec.source == "hub" and download:
        spec = models.downloaded(spec)
    spec = _with_corpus(spec)
    data = _data_spec(settings, *files)
    job = Job(
        run_dir=str(run_dir.absolute()),
        model=spec,
        data=data,
        training=_training_spec(settings, given),
        preset=preset,
        precision=precision,
        accelerator=machine.accelerator,
        hosts=placed.hosts,
        ds_config=config.ds_config,
        prepared=_prepared(spec, data),
        dsrun_version=__version__,
        prediction=prediction,
        launcher=placed.launcher,
    )
    if full := space.check(job):
        raise DsrunError(full)
    _check_operators(job, environ)
    warnings = [
        f"{finding.rule} {finding.path}: {finding.message}. {finding.suggestion}".rstrip(". ") + "."
        for finding in config.findings
    ]
    return Planned(job, config, (*notes, *warnings))


def _ranks(placed: Placed | None, given: Mapping[str, Any]) -> tuple[int, int]:
    """The ranks of each host, and the hosts, for the config; all together where hosts have different numbers."""
    if placed is None:
        return given.get("gpus") or 1, 1
    counts = {len(host.devices) for host in placed.hosts}
    return (counts.pop(), len(placed.hosts)) if len(counts) == 1 else (placed.world_size, 1)


def _wish(spec: ModelSpec, settings: Settings, placed: Placed, precision: str) -> fitting.Wish:
    return fitting.Wish(
        architecture=models.architecture(spec),
        name=spec.name,
        devices=placed.devices,
        nodes=len(placed.hosts),
        precision=precision,
        seq_len=settings["max_source_length"] + settings["max_target_length"],
        micro_batch=settings["micro_batch"],
        grad_accum=settings["grad_accum"],
        checkpointing=settings["gradient_checkpointing"],
    )


def _fit(
    wish: fitting.Wish, config: BuiltConfig, preset: str, machine: Machine, *, force: bool
) -> tuple[dict[str, float | str] | None, list[Problem], list[str]]:
    """What the job is predicted to take, the problem if that is too much, and what is worth saying otherwise."""
    found = fitting.check(wish, config.ds_config, preset, machine)
    if found is None:
        return (
            None,
            [],
            [f"memory is not predicted: the shape of {wish.name} is not one that dsrun plans for"],
        )
    plan, prediction = found
    if plan.verdict == FITS:
        return prediction, [], []
    if plan.verdict == OUT and not force:
        return prediction, [fitting.refusal(plan, machine, wish)], []
    if plan.verdict == OUT:
        return (
            prediction,
            [],
            [f"preset {preset} will run out of memory ({plan.reason}): without --force it is not started"],
        )
    return prediction, [], [f"preset {preset} is {plan.verdict} ({plan.reason})"]


def _options(
    given: Mapping[str, Any],
    settings: Settings,
    ranks: int,
    precision: str,
    overrides: tuple[str, ...],
) -> Options:
    return Options(
        gpus=ranks,
        precision=precision,
        micro_batch=settings["micro_batch"],
        grad_accum=settings["grad_accum"],
        grad_clip=given.get("grad_clip"),
        nvme_path=given.get("nvme_path"),
        lr=settings["lr"],
        overrides=overrides,
    )


def _largest_parameter(spec: ModelSpec | None) -> int | None:
    """Elements of the largest weight; None where the shape isn't known yet, or not one that dsrun plans for."""
    if spec is None:
        return None
    try:
        return from_config(models.architecture(spec), spec.name).largest
    except DsrunError:
        return None


def _overrides(
    overrides: tuple[str, ...], machine: Machine, given: Mapping[str, Any], settings: Settings, preset: str
) -> tuple[tuple[str, ...], list[str]]:
    """The user's --set texts, and torch's own AdamW where the fused one can't be compiled."""
    if machine.accelerator != "cuda" or extensions.has_nvcc():
        return overrides, []
    plain = build_config(preset, _options(given, settings, 1, "fp16", overrides)).ds_config
    if extensions.needed(plain, "cuda") != ["fused_adam"]:
        return overrides, []
    note = "no nvcc, so DeepSpeed's fused Adam can't be compiled: torch's AdamW is used (optimizer.params.torch_adam)"
    return (*overrides, "optimizer.params.torch_adam=true"), [note]


def _data_files(given: Mapping[str, Any], settings: Settings) -> tuple[Path, Path | None]:
    """The training and evaluation files; a model's own data set where the user names no file."""
    if given.get("train_file") is not None:
        evaluation = given.get("eval_file")
        return given["train_file"].absolute(), evaluation.absolute() if evaluation else None
    if settings["dataset"] is None:
        raise DsrunError(
            "this model ships without data",
            hint="Name a file: --train-file data.jsonl (JSONL, JSON, CSV or Parquet)",
        )
    folder = dataset_folder(settings["dataset"])
    evaluation = given.get("eval_file")
    return folder / "train.jsonl", evaluation.absolute() if evaluation else folder / "dev.jsonl"


def dataset_folder(name: str) -> Path:
    """The folder of a shipped data set, presets/datasets/NAME."""
    for folder in catalog.folders(DATASETS):
        if (folder / name / "train.jsonl").is_file():
            return folder / name
    raise DsrunError(f"there is no data set {name!r} in {DATASETS}", hint="Is the installation complete?")


def _check_data(train_file: Path, eval_file: Path | None, settings: Settings) -> list[Problem]:
    columns = (settings["prompt_column"], settings["response_column"])
    options = ("--prompt-column", "--response-column")
    files = [train_file] if eval_file is None else [train_file, eval_file]
    return [problem for path in files for problem in check_data_file(path, columns, options)]


def _data_spec(settings: Settings, train_file: Path, eval_file: Path | None) -> DataSpec:
    return DataSpec(
        train_file=str(train_file),
        eval_file=str(eval_file) if eval_file else None,
        prompt_column=settings["prompt_column"],
        response_column=settings["response_column"],
        max_source_length=settings["max_source_length"],
        max_target_length=settings["max_target_length"],
    )


def _training_spec(settings: Settings, given: Mapping[str, Any]) -> TrainingSpec:
    max_steps = given.get("max_steps")
    return TrainingSpec(
        lr=float(settings["lr"]),
        lr_schedule=settings["lr_schedule"],
        warmup_steps=settings["warmup_steps"],
        epochs=None if max_steps else float(settings["epochs"]),
        max_steps=max_steps,
        seed=settings["seed"],
        eval_steps=settings["eval_steps"],
        save_steps=settings["save_steps"],
        keep_checkpoints=settings["keep_checkpoints"],
        generate_rows=settings["generate_rows"],
        score_before=settings["score_before"],
        gradient_checkpointing=settings["gradient_checkpointing"],
    )


def _with_corpus(spec: ModelSpec) -> ModelSpec:
    """A model that is made here learns its tokenizer from a shipped data set: the name becomes a folder."""
    if spec.source != "random":
        return spec
    return replace(
        spec, tokenizer={**spec.tokenizer, "corpus": str(dataset_folder(spec.tokenizer["dataset"]))}
    )


def _prepared(spec: ModelSpec, data: DataSpec) -> Prepared:
    try:
        return prepared_paths(spec, data)
    except OSError as error:
        raise DsrunError(f"can't be read: {error.strerror}", where=str(error.filename)) from error


def _default_run_dir(model: str, preset: str) -> Path:
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{Path(model).name}-{Path(preset).stem}-{now}"


def check_packages() -> list[Problem]:
    absent = [name for name in TRAINING_PACKAGES if importlib.util.find_spec(name) is None]
    if not absent:
        return []
    return [Problem(f"training needs {', '.join(absent)}", hint="Install it: pip install 'dsrun[train]'")]


def _check_operators(job: Job, environ: Mapping[str, str]) -> None:
    names = extensions.needed(job.ds_config, job.accelerator)
    missing = extensions.missing(names, extensions.folder(environ, cache_root()))
    if missing:
        extensions.check_tools(missing, job.accelerator)
