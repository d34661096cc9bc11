"""From a run or a model's folder to the process that asks the model, for `dsrun chat` and `dsrun evaluate`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from dsrun.cluster import devices, gpu_use
from dsrun.cluster.devices import Machine
from dsrun.cluster.gpu_use import BusyError
from dsrun.data import thoughts
from dsrun.data.chat_templates import OWN_FORMAT
from dsrun.data.conversations import AUTO, columns_of, named_format
from dsrun.data.data_file import check_data_file, roles_in
from dsrun.data.hub_data import local_file
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.files import read_json_object
from dsrun.job import inference_request
from dsrun.job.inference_request import ChatRequest, Decoding, EvaluationRequest, InferenceModel
from dsrun.job.job import DataSpec, Job
from dsrun.job.layout import ADAPTER, DATA_REPORT
from dsrun.jobs.assembly.checks.packages import SCORE_PACKAGES, absent_packages
from dsrun.jobs.launchers.common import environment
from dsrun.jobs.runs import past_runs
from dsrun.jobs.runs.helper_process import result_of
from dsrun.models import adapters, resolve
from dsrun.options.commands import EvaluateOptions
from dsrun.options.declare import select
from dsrun.options.derived import halves
from dsrun.options.layers import Resolved
from dsrun.options.table import EvaluationOptions, FormatOptions, InferenceOptions, LengthOptions, StepOptions

CHAT, EVALUATE = "dsrun.training.inference.chat_process", "dsrun.training.inference.generate"
PACKAGES = {
    CHAT: ("torch", "transformers", "accelerate"),
    EVALUATE: ("torch", "transformers", "accelerate", "pyarrow", *SCORE_PACKAGES),
}
"""Packages that the two processes import."""


@dataclass(frozen=True)
class Found:
    """A model that can be asked."""

    folder: Path
    """Weights, config and tokenizer; or an adapter that names its model itself."""
    prompt_format: str
    """A key of FORMATS in dsrun/training/data/prompt_formats.py, `chat-template` or `auto`."""
    run: Path | None = None
    """The folder of the fine-tune that it came out of; None for any other model's folder."""
    job: Job | None = None
    """The job of that fine-tune."""
    adapter: Path | None = None
    """An adapter's folder, to be put on the model in `folder`."""


@dataclass(frozen=True)
class InferenceDevice:
    """The one device that a model is asked on."""

    accelerator: str
    """cpu or cuda."""
    precision: str
    """Type of weights and activations: fp16, bf16 or fp32."""
    env: dict[str, str]
    """The whole environment of the process, in which only this device is visible."""
    device: str
    """Its name, for the user."""
    note: str = ""
    """A remark for the user, that somebody else uses it, too; else empty."""


def find(text: str, adapter: Path | None = None) -> Found:
    """The model that the user means: a run by its folder or its name below runs/, or a model's or an adapter's folder.

    adapter: --adapter, to use with a model's folder. Raises DsrunError where there is no model, or none that can answer
    yet, with what to do.
    """
    model = _named(text)
    if adapter is None:
        return model
    if model.run or model.adapter or _is_adapter(model.folder):
        raise DsrunError(
            "is for a model's folder; a run or an adapter's folder has its own",
            where="--adapter",
            hint="Leave it out.",
        )
    path = adapter.expanduser().absolute()
    adapters.read_adapter(path)
    return replace(model, adapter=path)


def _named(text: str) -> Found:
    path = Path(text).expanduser()
    if path.is_file():
        hint = "A GGUF file is for `dsrun finetune`, or for llama.cpp." if path.suffix == ".gguf" else ""
        raise DsrunError("is a file: name a run or a model's folder", where=text, hint=hint)
    if path.is_dir() and not past_runs.is_run(path):
        return _of_folder(path.absolute())
    return _of_run(past_runs.named(text))


def _of_folder(path: Path) -> Found:
    if _is_adapter(path):
        return _of_adapter(path)
    if not (path / "config.json").is_file():
        hint = "A run's folder holds job.json; a model's config.json, weights and a tokenizer."
        raise DsrunError("holds neither a run nor a model", where=str(path), hint=hint)
    return Found(path, _checked(path))


def _checked(folder: Path) -> str:
    """The prompt format of a folder with a config, weights and a tokenizer. Raises DsrunError where one is lacking."""
    spec, _ = resolve.resolve(str(folder), None, training=False)
    return spec.prompt_format


def _is_adapter(folder: Path) -> bool:
    return (folder / adapters.CONFIG).is_file() and not (folder / "config.json").is_file()


def _of_adapter(path: Path) -> Found:
    """An adapter with the model that it was trained on. One without a tokenizer beside it has the model's."""
    base = adapters.read_adapter(path).base
    folder = Path(base or "")
    if not base or not (folder / "config.json").is_file():
        hint = "Name the model's folder, and the adapter with --adapter."
        raise DsrunError(
            f"the model that it was trained on is not in {base or 'its config'}", where=str(path), hint=hint
        )
    own = _checked(folder)
    if any((path / name).is_file() for name in resolve.TOKENIZER_FILES):
        return Found(path, OWN_FORMAT)
    return Found(folder, own, adapter=path)


def _of_run(path: Path) -> Found:
    run = past_runs.read(path)
    job = run.job
    if run.model is not None:
        _checked(run.model)
        return Found(run.model, job.model.prompt_format, path, job)
    if _is_adapter(path / ADAPTER) and run.state == "finished":
        adapter = _of_adapter(path / ADAPTER)
        return replace(adapter, prompt_format=job.model.prompt_format, run=path, job=job)
    raise DsrunError(f"has no model ({run.state})", where=str(path), hint=_next(run))


def _next(run: past_runs.Run) -> str:
    """The command by which a run without a model gets one."""
    path = str(run.path)
    if run.alive:
        return f"The model is written at the end: {shlex.join(['dsrun', 'logs', '-f', path])}"
    if run.state == "finished":
        return f"Its folder model/ is gone. Do it again: {shlex.join(['dsrun', 'rerun', path])}"
    kept = f"its newest checkpoint is {run.checkpoints[-1].name}. " if run.checkpoints else ""
    go_on = f"Continue it, so that it ends and writes its model: {shlex.join(['dsrun', 'resume', path])}"
    return (kept + go_on)[:1].upper() + (kept + go_on)[1:]


def choose_device(
    machine: Machine, device: int | None, precision: str | None, environ: Mapping[str, str]
) -> InferenceDevice:
    """The one device to compute on. device: the user's choice; without it a GPU that nobody uses, if there is one.

    CUDA_VISIBLE_DEVICES restricts and orders what can be chosen from. Raises DsrunError for a device that isn't there,
    BusyError for one that a training dsrun holds: it counts on the memory that it saw free.
    """
    # The folder is all that is needed: nothing is looked for on the network.
    env = {**environ, **environment.of_checkout(environ), "HF_HUB_OFFLINE": "1"}
    if machine.accelerator == "cpu":
        if device is not None:
            raise DsrunError(
                f"--device {device}: there is no GPU to use ({machine.reason})", hint="Leave it out."
            )
        env[devices.VISIBLE] = ""
        return InferenceDevice("cpu", precision or "fp32", env, "the CPU")
    busy = gpu_use.in_use(machine)
    if device is None:
        chosen = _free_first(machine, busy, environ)
    else:
        there = devices.visible_devices(machine, environ)
        (chosen,) = devices.named(machine, (device,), f"--device {device}", there)
    use = busy.get(chosen)
    gpu = next(gpu for gpu in machine.gpus if gpu.index == chosen)
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that indices mean what nvidia-smi shows
    env[devices.VISIBLE] = ",".join(devices.cuda_uuids(machine, (chosen,))) or str(chosen)
    note = f"{gpu_use.in_words(chosen, use)}; it is used anyway" if use else ""
    own = precision or replace(machine, gpus=(gpu,)).half_precision
    return InferenceDevice("cuda", own, env, f"GPU {chosen} ({gpu.name})", note)


def _free_first(machine: Machine, busy: Mapping[int, gpu_use.GpuUse], environ: Mapping[str, str]) -> int:
    """A GPU that nobody uses; else one that is shared with others, but with no training dsrun."""
    all_of_them = len(devices.visible_indices(machine, environ))
    for index in devices.free_first(machine, all_of_them, environ):
        if index not in busy or not busy[index].holder:
            return index
    lines = [gpu_use.in_words(index, use) for index, use in busy.items()]
    hint = "Wait for one, or ask on the CPU: DS_ACCELERATOR=cpu dsrun ..."
    raise BusyError("every GPU is held by a training dsrun", lines, hint=hint)


def model_of(model: Found, device: InferenceDevice, options: InferenceOptions) -> InferenceModel:
    """The model of a request: where it is, its prompt format, and what its chat template is told.

    What the options say takes the place of what the run was trained with. Raises DsrunError for a bad --template-arg.
    """
    arguments, thinking = thoughts.template_arguments(options.template_arg), options.thinking
    answers: dict[str, int] = {}
    if model.job is not None and options.prompt_format is None and thinking == thoughts.AUTO:
        arguments = {**model.job.model.template_args, **arguments}
        thinking = model.job.model.thinking
        answers = _answers(model.run)
    return InferenceModel(
        str(model.folder),
        options.prompt_format or model.prompt_format,
        device.accelerator,
        device.precision,
        str(model.adapter) if model.adapter else None,
        thinking,
        arguments,
        answers,
    )


def _training_rows(run: Path | None) -> dict[str, Any]:
    """The report on a run's training rows; empty where there is none."""
    path = run / DATA_REPORT if run else None
    report = read_json_object(path).get("train") if path and path.is_file() else None
    return report if isinstance(report, dict) else {}


def trained_system(run: Path | None) -> str | None:
    """The system text that all training rows of a run had; None where they had several, or none."""
    text = _training_rows(run).get("system")
    return text if isinstance(text, str) else None


def _answers(run: Path | None) -> dict[str, int]:
    """Numbers of a run's answers with thoughts and without; empty where its data report doesn't say."""
    counts = _training_rows(run)
    return {
        name: counts[name]
        for name in (thoughts.WITH_THOUGHTS, thoughts.WITHOUT_THOUGHTS)
        if isinstance(counts.get(name), int)
    }


def evaluation(
    answering: Found,
    model: InferenceModel,
    decoding: Decoding,
    resolved: Resolved[EvaluateOptions],
    cwd: Path,
) -> EvaluationRequest:
    """The request of `dsrun evaluate`.

    Where the rows are those that the run held out itself, as many prompts are answered as it answered. Raises
    DsrunError with all that is wrong with the file, and where the answers would overwrite something.
    """
    job, options = answering.job, resolved.options
    if options.eval_file is None and (job is None or job.data.eval_file is None):
        whose = "the run held no rows out" if job else "a folder says nothing of held-out rows"
        raise DsrunError(
            whose, where=str(answering.run or answering.folder), hint="Name a file: --eval-file dev.jsonl"
        )
    data = _data(job, resolved)
    path = Path(data.eval_file or "")
    problems = check_data_file(path, columns_of(data), data.data_format)
    answers = options.generate_rows
    if answers is None and job is not None and options.eval_file is None:
        # A pipeline can't answer, and so as many are as another run would have answered.
        answers = job.training.generate_rows if job.parallel.pp == 1 else EvaluationOptions().generate_rows
    output = options.output or _output(answering, path, decoding, cwd)
    problems += _check_output(output, force=options.force)
    raise_all(problems)
    default = job.micro_batch if job else StepOptions().micro_batch
    return EvaluationRequest(
        model=model,
        decoding=decoding,
        data=data,
        limit=options.limit,
        answers=answers,
        micro_batch=options.micro_batch or default,
        output=str(output.absolute()),
        overwrite=options.force,
        metrics=job.training.metrics if job and not resolved.said("metrics") else options.metrics,
    )


def _data(job: Job | None, resolved: Resolved[EvaluateOptions]) -> DataSpec:
    """The held-out examples: the run's, as far as no option says otherwise; of a folder alone the defaults'."""
    names = {option.name for kind in (FormatOptions, LengthOptions) for option in fields(kind)}
    changed: dict[str, Any] = {name: value for name, value in resolved.user.items() if name in names}
    file = resolved.options.eval_file
    if file is not None:
        changed["eval_file"] = str(local_file(file, "--eval-file"))
        changed.setdefault("data_format", AUTO)  # the run's says nothing of another file
    if (most := changed.get("max_length")) is not None:
        changed |= halves(most)
    elif {"max_source_length", "max_target_length"} & changed.keys():
        changed["max_length"] = None
    elif job is None:
        longest = LengthOptions().longest_example
        changed |= {"max_length": longest, **halves(longest)}
    if (named := named_format(changed.get("data_format", AUTO), changed)) != AUTO:
        changed["data_format"] = named
    if job is not None:
        data = replace(job.data, **changed, strict_data=False)  # that was about training
    else:
        data = replace(
            select(DataSpec, resolved.options, train_file=changed["eval_file"], eval_file=None), **changed
        )
    roles = roles_in(Path(data.eval_file), columns_of(data), data.data_format) if data.eval_file else None
    if roles is None or not roles.prompt or not roles.response:
        return data
    return replace(data, prompt_column=roles.prompt, response_column=roles.response)


def _output(answering: Found, path: Path, decoding: Decoding, cwd: Path) -> Path:
    """The default file for answers: into the run's folder; a model's own folder is left alone."""
    drawn = f"-sampled-{decoding.seed}" if decoding.temperature else ""
    if answering.run:
        return answering.run / f"predictions-{path.stem}{drawn}.jsonl"
    return cwd / f"predictions-{answering.folder.name}-{path.stem}{drawn}.jsonl"


def _check_output(path: Path, *, force: bool) -> list[Problem]:
    where = str(path)
    if path.is_dir():
        return [Problem("is a folder", where, "Name a file with --output.")]
    if path.exists() and not force:
        return [Problem("exists already", where, "--force replaces it; or name another file with --output.")]
    if not path.absolute().parent.is_dir():
        return [
            Problem("can't be written: there is no such folder", where, "Name another file with --output.")
        ]
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        return [
            Problem("can't be written: its folder is not writable", where, "Name another file with --output.")
        ]
    return []


def check_packages(module: str) -> None:
    """Raise DsrunError where something that the process imports is not installed."""
    raise_all(absent_packages(PACKAGES[module], "this"))


def command(request: ChatRequest | EvaluationRequest) -> list[str]:
    """The command line of the process that computes: its module, and the request as JSON."""
    module = CHAT if isinstance(request, ChatRequest) else EVALUATE
    return [sys.executable, "-m", module, inference_request.to_json(request)]


def exec_chat(request: ChatRequest, device: InferenceDevice) -> NoReturn:
    """Replace this process by the chat, which takes over the terminal, its signals and the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    argv = command(request)
    os.execve(argv[0], argv, device.env)  # noqa: S606  (no shell is wanted)


def run_evaluation(request: EvaluationRequest, device: InferenceDevice) -> dict[str, Any]:
    """Run an evaluation to its end; return its result (dsrun.training.inference.generate). Progress goes to stderr.

    Raises DsrunError with what is wrong with the input, JobFailedError where the process died, KeyboardInterrupt or
    TerminatedError if it was ended.
    """
    return result_of(command(request), device.env, "the evaluation", request.model.folder)
