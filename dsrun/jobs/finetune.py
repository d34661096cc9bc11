"""From what the user asked for to a Job: everything is looked at here, before anything is started or written."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from dsrun import __version__, catalog
from dsrun.cluster import extensions
from dsrun.cluster.devices import Machine
from dsrun.config.build import BuiltConfig, Options, build_config
from dsrun.config.options import NVME_VARIABLE
from dsrun.errors import DsrunError, Problem, collected
from dsrun.jobs import fitting, kernels, models, optimizers, run_folder, space, tuning
from dsrun.jobs.adapters import PREFIX
from dsrun.jobs.cache import cache_root, prepared_paths
from dsrun.jobs.claims import Look, Take
from dsrun.jobs.defaults import DEFAULTS, METHODS, OFFICIAL, OFFICIAL_PTUNING
from dsrun.jobs.job import DataSpec, Job, ModelSpec, Prepared, TrainingSpec
from dsrun.jobs.placed import Placed, Wanted
from dsrun.planner.plan import FITS, OUT
from dsrun.planner.shape import from_config
from dsrun.rows import check_data_file, format_of, unusable
from dsrun.talks import AUTO, PROMPT_RESPONSE, Columns

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


class Files(NamedTuple):
    """Where the rows are. weights: of the training files; empty: all the same."""

    train: tuple[Path, ...]
    evaluation: Path | None
    weights: tuple[float, ...] = ()

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file."""
        return self.train if self.evaluation is None else (*self.train, self.evaluation)


class Settings:
    """Values by name; the nearest wins: what the user gave, what the method takes, the official recipe, the model
    file's defaults, dsrun's."""

    def __init__(self, given: Mapping[str, Any], model_defaults: Mapping[str, Any], where: str) -> None:
        for name in model_defaults:
            if name not in DEFAULTS and name != "dataset":
                hint = catalog.suggestion(name, DEFAULTS, "")
                raise DsrunError(f"[defaults]: unknown key {name!r}", where=where, hint=hint)
        method = given.get("method") or model_defaults.get("method", DEFAULTS["method"])
        if method not in METHODS:
            hint = catalog.suggestion(str(method), METHODS, "")
            raise DsrunError(f"[defaults]: there is no method {method!r}", where=where, hint=hint)
        official = OFFICIAL_PTUNING if method == PREFIX else OFFICIAL
        recipe = official if given.get("official") else {}
        self._layers = (given, METHODS[method], recipe, model_defaults, DEFAULTS)

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
    with collected(problems):
        given = tuning.with_adapter(given)
    spec: ModelSpec | None = None
    settings = Settings(given, {}, "")
    files: Files | None = None
    placed: Placed | None = None
    config: BuiltConfig | None = None
    prediction: dict[str, float | str] | None = None
    notes: list[str] = []
    with collected(problems):
        spec, defaults = models.resolve(request.model, given.get("model_path"))
        settings = Settings(given, defaults, f"model {request.model}")
        models.check_export_format(spec, settings["export_format"])
    trained = tuning.spec_of(settings)
    problems += [*tuning.check_export(trained, settings["export_format"]), *tuning.check_packages(trained)]
    problems += tuning.check_attention(trained, settings["attention"])
    problems += tuning.check_targets(trained, models.architecture(spec)) if spec else []
    with collected(problems):
        if not problems or "train_file" in given:
            files = data_files(given, settings)
            problems += check_data(files, given, settings)
    with collected(problems):
        placed = (take or Look(machine, environ))(Wanted.of(given))
        machine = placed.machine
        notes += placed.notes
    precision = given.get("precision") or _own_gpus(machine, placed).default_precision
    preset = settings["preset"]
    chosen, optimizer_params = kernels.Chosen(), dict[str, Any]()
    with collected(problems):
        if spec and placed:
            devices = kernels.devices_of(machine, placed.devices, known=placed.known)
            kind = models.architecture(spec).get("model_type")
            chosen = kernels.chosen(settings, devices, kind, precision)
    with collected(problems):
        wish = _wish(spec, settings, placed, precision, chosen) if spec and placed else None
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
        problems += tuning.check_place(trained, machine.accelerator, config.ds_config if config else None)
        if config and settings["optimizer"] == optimizers.ADAMW_8BIT:
            if refused := optimizers.refusals(config.ds_config, machine.accelerator, preset):
                raise DsrunError(refused)
            config, optimizer_params = optimizers.taken_out(config)
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
        models.check_export_format(spec, settings["export_format"])  # what a repository holds is known now
    spec = _with_corpus(spec)
    data, said = _data_spec(settings, given, files)
    notes += said
    job = Job(
        run_dir=str(run_dir.absolute()),
        model=spec,
        data=data,
        training=replace(
            _training_spec(settings, given), optimizer_params=optimizer_params, liger=chosen.liger
        ),
        preset=preset,
        precision=precision,
        accelerator=machine.accelerator,
        hosts=placed.hosts,
        ds_config=config.ds_config,
        prepared=_prepared(spec, data),
        dsrun_version=__version__,
        prediction=prediction,
        launcher=placed.launcher,
        tuning=trained,
    )
    if full := space.check(job):
        raise DsrunError(full)
    _check_operators(job, environ)
    warnings = [
        f"{finding.rule} {finding.path}: {finding.message}. {finding.suggestion}".rstrip(". ") + "."
        for finding in config.findings
    ]
    return Planned(job, config, (*notes, *chosen.notes, *warnings))


def _own_gpus(machine: Machine, placed: Placed | None) -> Machine:
    """The machine with the job's GPUs alone, where it is known which they are: of several kinds others don't count."""
    chosen = placed.devices if placed and placed.known else ()
    own = tuple(gpu for gpu in machine.gpus if gpu.index in chosen)
    return replace(machine, gpus=own) if own else machine


def _ranks(placed: Placed | None, given: Mapping[str, Any]) -> tuple[int, int]:
    """The ranks of each host, and the hosts, for the config; all together where hosts have different numbers."""
    if placed is None:
        return given.get("gpus") or 1, 1
    counts = {len(host.devices) for host in placed.hosts}
    return (counts.pop(), len(placed.hosts)) if len(counts) == 1 else (placed.world_size, 1)


def _wish(
    spec: ModelSpec, settings: Settings, placed: Placed, precision: str, chosen: kernels.Chosen
) -> fitting.Wish:
    return fitting.Wish(
        architecture=models.architecture(spec),
        name=spec.name,
        devices=placed.devices,
        nodes=len(placed.hosts),
        precision=precision,
        seq_len=settings["max_source_length"] + settings["max_target_length"] + bool(settings["official"]),
        micro_batch=settings["micro_batch"],
        grad_accum=settings["grad_accum"],
        checkpointing=settings["gradient_checkpointing"],
        tuning=tuning.spec_of(settings),
        optimizer=settings["optimizer"],
        fused_loss=chosen.liger,
        flash=settings["attention"] != kernels.EAGER,
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
        grad_clip=settings["grad_clip"],
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
    if settings["optimizer"] != optimizers.ADAMW:
        return overrides, []
    plain = build_config(preset, _options(given, settings, 1, "fp16", overrides)).ds_config
    if extensions.needed(plain, "cuda") != ["fused_adam"]:
        return overrides, []
    note = "no nvcc, so DeepSpeed's fused Adam can't be compiled: torch's AdamW is used (optimizer.params.torch_adam)"
    return (*overrides, "optimizer.params.torch_adam=true"), [note]


def data_files(given: Mapping[str, Any], settings: Settings) -> Files:
    """The training and evaluation files; a model's own data set where the user names no file."""
    evaluation = given.get("eval_file")
    if given.get("train_file") is not None:
        more = tuple(Path(path).absolute() for path in given.get("more_files", ()))
        weights = tuple(given.get("weights", ()))
        return Files(
            (given["train_file"].absolute(), *more), evaluation.absolute() if evaluation else None, weights
        )
    if settings["dataset"] is None:
        raise DsrunError(
            "this model ships without data",
            hint="Name a file: --train-file data.jsonl (JSONL, JSON, CSV or Parquet)",
        )
    folder = dataset_folder(settings["dataset"])
    return Files((folder / "train.jsonl",), evaluation.absolute() if evaluation else folder / "dev.jsonl")


def dataset_folder(name: str) -> Path:
    """The folder of a shipped data set, presets/datasets/NAME."""
    for folder in catalog.folders(DATASETS):
        if (folder / name / "train.jsonl").is_file():
            return folder / name
    raise DsrunError(f"there is no data set {name!r} in {DATASETS}", hint="Is the installation complete?")


def check_data(files: Files, given: Mapping[str, Any], settings: Settings) -> list[Problem]:
    """What is wrong with the files, judged by their first rows or, with strict_data, by all; and with the options."""
    problems = [problem for path in files.all for problem in check_file(path, given, settings)]
    if settings["strict_data"] and not problems:
        columns, data_format = _columns(settings), asked_format(given, settings)
        problems = [problem for path in files.all for problem in unusable(path, columns, data_format)]
    if settings["official"] and settings["train_on_prompt"]:
        hint = "ChatGLM2's own script trains on responses only; leave one of the two out."
        problems.append(Problem("does not go with --official", "--train-on-prompt", hint))
    if settings["official"] and settings["packing"]:
        hint = "ChatGLM2's own script pads every row to the same length; leave one of the two out."
        problems.append(Problem("does not go with --official", "--packing", hint))
    return problems


def check_file(path: Path, given: Mapping[str, Any], settings: Settings) -> list[Problem]:
    """What is wrong with a data file, judged by its first rows."""
    options = ("--prompt-column", "--response-column")
    return check_data_file(path, _columns(settings), options, asked_format(given, settings))


def _columns(settings: Settings) -> Columns:
    return Columns(settings["prompt_column"], settings["response_column"], settings["history_column"])


def asked_format(given: Mapping[str, Any], settings: Settings) -> str:
    """The format that the user names, by name or by naming its columns; else AUTO."""
    named = settings["data_format"]
    by_columns = {"prompt_column", "response_column"} & set(given)
    return PROMPT_RESPONSE if named == AUTO and by_columns else str(named)


def _data_spec(settings: Settings, given: Mapping[str, Any], files: Files) -> tuple[DataSpec, list[str]]:
    """The data, and a line for each file whose format was found out and is not the plainest."""
    columns, data_format = _columns(settings), asked_format(given, settings)
    found = [format_of(path, columns, data_format) for path in files.all]
    notes = [
        f"{path} is read as {kind} (--data-format decides otherwise)"
        for path, kind in dict(zip(files.all, found, strict=True)).items()
        if kind not in (data_format, PROMPT_RESPONSE)
    ]
    first, *more = map(str, files.train)
    spec = DataSpec(
        train_file=first,
        eval_file=str(files.evaluation) if files.evaluation else None,
        prompt_column=columns.prompt,
        response_column=columns.response,
        max_source_length=settings["max_source_length"],
        max_target_length=settings["max_target_length"],
        more_files=tuple(more),
        weights=files.weights if any(weight != 1 for weight in files.weights) else (),
        history_column=columns.history,
        data_format=found[0] if len(set(found)) == 1 else data_format,
        train_on_prompt=bool(settings["train_on_prompt"]),
        strict_data=bool(settings["strict_data"]),
        official=bool(settings["official"]),
    )
    return spec, notes


def _training_spec(settings: Settings, given: Mapping[str, Any]) -> TrainingSpec:
    max_steps = None if "epochs" in given else settings["max_steps"]
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
        packing=settings["packing"],
        export_format=settings["export_format"],
        optimizer=settings["optimizer"],
        attention=settings["attention"],
        compute_metrics=settings["compute_metrics"],
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
