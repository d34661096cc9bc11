"""The preparation of a job, before any device is taken: the model folder and the tokenised rows.

`python -m dsrun.training.prepare JOB` runs in a process of its own, so that `dsrun` itself never imports torch. The
first rank of each host prepares what is small, or has left the cache since.
Everything lands in the cache under names made of its content, whole or not at all; what is there already stays. The
names are in the job: files that are read here, now or on another host, are compared with those that the job was planned
with, and nothing else gets their names.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dsrun.data import cache, inputs
from dsrun.data.conversations import is_text
from dsrun.data.data_file import BadRows
from dsrun.data.rows import read_rows
from dsrun.data.sequence_lengths import MOST_CUT
from dsrun.data.thoughts import with_defaults
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.files import FULL, explained, is_full, json_text, make_readable, write_atomic
from dsrun.host.system import nearest_there
from dsrun.job.job import DataSpec, Job
from dsrun.job.layout import DATA_REPORT
from dsrun.training.data.prompts import PromptEncoder, encoder_for
from dsrun.training.data.template_encoder import served_with
from dsrun.training.data.tokenizing import DataFile, lines, tokenise
from dsrun.words import counted, size_text

ONE_PROCESS_BYTES = 1 << 20
"""Files of up to this size are tokenised by one process: more would only take time to start."""


def main() -> int:
    """Prepare the job whose job.json is the first argument. Messages go to stdout, one a line."""
    job = Job.read(Path(sys.argv[1]))
    try:
        prepare(job, lambda text: print(text, flush=True), len(os.sched_getaffinity(0)))  # noqa: T201
    except DsrunError as error:
        problems = error.problems
    except Exception as error:
        full = _disk_full(error, job)
        if full is None:
            raise
        traceback.print_exc()  # into prepare.log
        problems = [full]
    else:
        return 0
    print(json.dumps({"problems": [vars(problem) for problem in problems]}), flush=True)  # noqa: T201
    return 1


def _disk_full(error: BaseException, job: Job) -> Problem | None:
    """The problem of a cache's disk without room; None for another error."""
    # safetensors and torch have errors of their own, which only quote the system's words.
    words = f"{error!r} {error.__cause__!r}"
    if not is_full(error) and not any(os.strerror(number) in words for number in FULL):
        return None
    written = error.filename if isinstance(error, OSError) else None
    folder = nearest_there(Path(written or job.prepared.train_rows or job.prepared.model_dir).parent)
    size = size_text(shutil.disk_usage(folder).total)
    hint = "Free some room there, or take another disk for the cache: DSRUN_CACHE=/path"
    why = "Disk quota exceeded" if getattr(error, "errno", 0) == errno.EDQUOT else os.strerror(errno.ENOSPC)
    what = f"the cache's disk is full: {why} (it has {size}; what was half written is removed)"
    return Problem(what, str(folder), hint)


def prepare(job: Job, say: Callable[[str], None], processes: int = 1) -> None:
    """Make everything that the job needs and the cache does not hold yet.

    Raises DsrunError where it can't, or where the files are not those that the job was planned with.
    processes: the number that tokenise. They are forked: more than one only where nothing else runs in this process.
    """
    prepare_model(job, say)
    wanted = [(inputs.TRAIN, data_files(job.data), job.prepared.train_rows)]
    if job.data.eval_file and job.prepared.eval_rows:
        wanted.append((inputs.EVAL, [DataFile(Path(job.data.eval_file))], job.prepared.eval_rows))
    missing = [(kind, sources, Path(target)) for kind, sources, target in wanted if not Path(target).exists()]
    if missing:
        # Now, which takes a moment, so that no long work is in vain. The files that were really read are compared once
        # more, before anything is kept (`_check_rows`): they may change while they are read.
        inputs.check(job, {kind for kind, _, _ in missing}, trust_times=True)
    encoder = encoder_of(job) if missing else None
    if encoder and job.model.source == "chatglm":
        paths = [source.path for _, sources, _ in missing for source in sources]
        _check_tokenizer(job, encoder.tokenizer, paths, say)
    for kind, sources, target in missing:
        names = ", ".join(str(source.path) for source in sources)
        with explained("can't be read"):
            size = sum(source.path.stat().st_size for source in sources)
        count = processes if size > ONE_PROCESS_BYTES else 1
        say(f"tokenising {names}" + (f" in {count} processes" if count > 1 else ""))
        check = partial(_check_rows, job, kind)
        report = tokenise(sources, job.data, encoder, target, processes=count, say=say, check=check)
        for line in lines(report):
            say(f"  {line}")
    _write_reports(job)
    _check_bad_rows(job)
    _check_truncation(job)


def _check_rows(job: Job, kind: str, digests: Sequence[str]) -> None:
    """Raise DsrunError where rows would get a name in the cache that is not their content's.

    kind: of the data files, TRAIN or EVAL; digests: of these files as they were read, in their order.
    """
    of_model = {inputs.TOKENIZER} if inputs.read_in_place(job) else set()
    planned = job.prepared.inputs
    rest = inputs.read_inputs(job.model, job.data, kinds=of_model if planned else inputs.OF_MODEL)
    files = inputs.data_files(job.data, kind, digests)
    now = replace(rest, files=(*files, *rest.files))
    if planned:
        raise_all(inputs.problems(planned, now, {kind, *of_model}))
    name = "train_rows" if kind == inputs.TRAIN else "eval_rows"
    cache.check_name(job, name, planned or now)


def _check_bad_rows(job: Job) -> None:
    """Raise DsrunError where more than MOST_BAD of the rows can't be trained on, unless --allow-bad-rows says so."""
    path = Path(f"{job.prepared.train_rows}.json")
    if job.data.official or job.data.allow_bad_rows or not path.is_file():
        return
    report = json.loads(path.read_text(encoding="utf-8"))
    found = BadRows(report["read"], report["bad"] + report["empty"], tuple(report["dropped"].items()))
    if found.too_many:
        hint = f"Mend them: {report['bad_rows_file']} lists them. Or train on the others: --allow-bad-rows."
        raise DsrunError(found.words, where=", ".join(job.data.train_files), hint=hint)


def _check_truncation(job: Job) -> None:
    """Raise DsrunError where more than MOST_CUT of the training examples are cut, unless --allow-truncation says so."""
    path = Path(f"{job.prepared.train_rows}.json")
    if job.data.official or job.data.allow_truncation or not path.is_file():
        return
    report = json.loads(path.read_text(encoding="utf-8"))
    if report["truncated"] > MOST_CUT:
        both = f"{job.data.max_source_length} + {job.data.max_target_length}"
        limits = f"{job.data.max_length or both} tokens"
        parts = f"{report['prompts_shortened']:,} prompts and {report['responses_cut']:,} responses"
        options = "--max-length" if job.data.max_length else "--max-source-length or --max-target-length"
        raise DsrunError(
            f"{report['truncated']:.0%} of {report['rows']:,} examples are longer than {limits}: {parts}",
            where=", ".join(job.data.train_files),
            hint=f"Raise {options}, or train on what is left: --allow-truncation.",
        )


def prepare_model(job: Job, say: Callable[[str], None]) -> None:
    """Make the model folder, where the cache doesn't hold it. Raises DsrunError as `prepare` does."""
    model_dir, tokens = Path(job.prepared.model_dir), job.model.special_tokens
    if inputs.read_in_place(job) or model_dir.exists():
        return
    inputs.check(job, inputs.OF_MODEL, trust_times=False)
    planned = job.prepared.inputs or inputs.read_inputs(job.model, job.data, kinds=inputs.OF_MODEL)
    cache.check_name(job, "model_dir", planned)
    with _new_folder(model_dir) as folder:
        _MAKERS[job.model.source](job, folder, say)
        if tokens:
            from dsrun.training.models.new_tokens import add_tokens

            say(f"adding {counted(len(tokens), 'token')} to the tokenizer and the embeddings")
            add_tokens(folder, tokens, job.model.chat_template)


def tokenizer_of(job: Job) -> tuple[Any, PromptEncoder]:
    """The job's tokenizer, and the encoder of its prompt format. A tokenizer without a template gets the format's."""
    encoder = _prompt_encoder(job)
    tokenizer = encoder.tokenizer
    if not tokenizer.chat_template:  # the exported folder then asks the way the model is trained
        tokenizer.chat_template = encoder.chat_template
    elif isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = with_defaults(tokenizer.chat_template, served_with(job, tokenizer))
    return tokenizer, encoder


def _prompt_encoder(job: Job) -> PromptEncoder:
    """The encoder with the prepared tokenizer, which gets the job's own chat template, if there is one."""
    from dsrun.training.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(job.prepared.model_dir))
    if job.model.chat_template:
        tokenizer.chat_template = job.model.chat_template
    return encoder_for(tokenizer, job.model.prompt_format, job.model.thinking, job.model.template_args)


def _check_tokenizer(job: Job, tokenizer: Any, paths: Sequence[Path], say: Callable[[str], None]) -> None:
    """Compare the tokenizer that was made for the checkpoint with the checkpoint's own, on the rows themselves.

    Raises DsrunError with the text where their ids differ.
    """
    from dsrun.training.models.tokenizer import check_on_texts, sample_of

    rows = (row for path in paths for _, row in read_rows(path))
    style = job.model.tokenizer["style"]
    count = check_on_texts(tokenizer, Path(job.model.location), style, filter(is_text, sample_of(rows)))
    say(
        f"the tokenizer made for {job.model.location} gives its tokenizer.model's ids: {count:,} texts compared"
    )


def _make_random(job: Job, folder: Path, say: Callable[[str], None]) -> None:
    from dsrun.training.models.tiny import build_random_model

    say(f"making {job.model.name}: its tokenizer from the shipped text, random weights")
    build_random_model(job.model, Path(job.model.tokenizer["corpus"]), folder)


def _make_from_gguf(job: Job, folder: Path, say: Callable[[str], None]) -> None:
    """A GGUF file as a Hugging Face folder: the weights dequantised, its own tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dsrun.training import finite

    path = Path(job.model.location)
    say(f"reading {path.name} (GGUF) and writing it as safetensors")
    try:
        dtype = getattr(torch, _gguf_dtype(path))
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, **_dequantised()
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        hint = "Use the Hugging Face folder that the GGUF file was made from."
        raise DsrunError(f"transformers can't read it: {error}", where=str(path), hint=hint) from error
    for name, weight in model.named_parameters():
        finite.check(weight, name, str(path))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantised() -> dict[str, Any]:
    """Arguments that make from_pretrained return a plain model: one with a GgufConfig can't be saved otherwise."""
    try:
        from transformers import GgufConfig
    except ImportError:  # older versions always dequantise
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _gguf_dtype(path: Path) -> str:
    """The torch type that holds the file's matrices without loss: quantised ones stand for 16-bit numbers."""
    import gguf

    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1}
    if gguf.GGMLQuantizationType.F32 in kinds:
        return "float32"
    return "bfloat16" if gguf.GGMLQuantizationType.BF16 in kinds else "float16"


def _make_from_chatglm(job: Job, folder: Path, say: Callable[[str], None]) -> None:
    from dsrun.training.models.chatglm import prepare_folder

    say(f"{job.model.location}: ChatGLM's original format; loaded from there under transformers' names")
    prepare_folder(job.model, folder)


def _take_over(job: Job, folder: Path, say: Callable[[str], None]) -> None:  # noqa: ARG001  (as all makers)
    from dsrun.training.models.new_tokens import link_folder

    link_folder(Path(job.model.location), folder)


_MAKERS: dict[str, Callable[[Job, Path, Callable[[str], None]], None]] = {
    "folder": _take_over,
    "random": _make_random,
    "gguf": _make_from_gguf,
    "chatglm": _make_from_chatglm,
}


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder that gets its name only when it is complete; the first of two makers wins."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
        make_readable(folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.exists():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def data_files(data: DataSpec) -> list[DataFile]:
    """The training files of a job with their weights."""
    weights = data.weights or (1.0,) * len(data.train_files)
    return [DataFile(Path(path), weight) for path, weight in zip(data.train_files, weights, strict=True)]


def encoder_of(job: Job) -> Any:
    """The encoder of the job's rows."""
    return rows_encoder(_prompt_encoder(job), job.data)


def rows_encoder(encoder: PromptEncoder, data: DataSpec) -> Any:
    """The encoder of rows: that of their prompt format, or the reference recipe's."""
    if data.official:
        from dsrun.training.data.reference_recipe import ReferenceEncoder

        return ReferenceEncoder(encoder)
    return encoder


def _write_reports(job: Job) -> None:
    """Write the rows' reports, which lie in the cache beside them, into the run's folder."""
    reports = {}
    evaluation = [job.data.eval_file] if job.data.eval_file else []
    for name, rows, files in (
        ("train", job.prepared.train_rows, job.data.train_files),
        ("eval", job.prepared.eval_rows, evaluation),
    ):
        path = Path(f"{rows}.json")
        if rows and path.is_file():
            reports[name] = json.loads(path.read_text(encoding="utf-8"))
            for entry, file in zip(reports[name]["files"], files, strict=True):
                entry["file"] = file  # the cache's report names where the same content lay at first
    text = json_text(reports, indent=2) + "\n"
    if Path(job.run_dir).is_dir():
        write_atomic(Path(job.run_dir) / DATA_REPORT, text)


if __name__ == "__main__":
    sys.exit(main())
