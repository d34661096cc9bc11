"""What is made once, before any device is taken: the model folder and the tokenised rows.

`python -m dsrun.training.prepare JOB` runs in a process of its own, so that `dsrun` itself never imports torch; the
first rank of each host does the same for what is small, or is gone from the cache by then.
Everything lands in the cache under names made of its content, whole or not at all; what is there is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError
from dsrun.files import make_readable
from dsrun.jobs.job import DataSpec, Job
from dsrun.rows import BadRowError, read_rows, texts_of

CHUNK_ROWS = 4096


def main() -> int:
    """Prepare the job whose job.json is the first argument; talk goes to stdout, one line each."""
    try:
        prepare(Job.read(Path(sys.argv[1])), say=lambda text: print(text, flush=True))  # noqa: T201
    except DsrunError as error:
        print(json.dumps({"problems": [vars(problem) for problem in error.problems]}), flush=True)  # noqa: T201
        return 1
    return 0


def prepare(job: Job, say: Callable[[str], None]) -> None:
    """Make what the job needs and the cache does not hold yet. Raises DsrunError where it can't."""
    model_dir = Path(job.prepared.model_dir)
    if job.model.source != "folder" and not model_dir.exists():
        with _new_folder(model_dir) as folder:
            _MAKERS[job.model.source](job, folder, say)
    wanted = [(job.data.train_file, job.prepared.train_rows)]
    if job.data.eval_file and job.prepared.eval_rows:
        wanted.append((job.data.eval_file, job.prepared.eval_rows))
    missing = [(source, target) for source, target in wanted if not Path(target).exists()]
    if missing:
        from dsrun.training.model import load_tokenizer
        from dsrun.training.prompts import PromptEncoder

        encoder = PromptEncoder(load_tokenizer(job), job.model.prompt_format)
        for source, target in missing:
            say(f"tokenising {source}")
            report = tokenise(Path(source), job.data, encoder, Path(target))
            say(describe(report))


def _make_random(job: Job, folder: Path, say: Callable[[str], None]) -> None:
    from dsrun.training.tiny import build_random_model

    say(f"making {job.model.name}: its tokenizer from the shipped text, random weights")
    build_random_model(job.model, Path(job.model.tokenizer["corpus"]), folder)


def _make_from_gguf(job: Job, folder: Path, say: Callable[[str], None]) -> None:
    """A GGUF file as a Hugging Face folder: the weights dequantised, its own tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(job.model.location)
    say(f"reading {path.name} (GGUF) and writing it as safetensors")
    try:
        dtype = getattr(torch, _gguf_dtype(path))
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, **_dequantised()
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise DsrunError(
            f"transformers can't read it: {error}",
            where=str(path),
            hint="Use the Hugging Face folder that the GGUF file was made from.",
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantised() -> dict[str, Any]:
    """What makes from_pretrained return a plain model: one that GgufConfig has a say in can't be saved otherwise."""
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
    from dsrun.training.chatglm import convert

    say(f"{job.model.location}: ChatGLM's original format; written once under transformers' names for it")
    convert(job.model, folder, say)


_MAKERS: dict[str, Callable[[Job, Path, Callable[[str], None]], None]] = {
    "random": _make_random,
    "gguf": _make_from_gguf,
    "chatglm": _make_from_chatglm,
}


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder that appears under its name only when it is complete; the first of two makers wins."""
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


def tokenise(source: Path, data: DataSpec, encoder: Any, target: Path) -> dict[str, Any]:
    """Encode a file's rows into an Arrow file, and return (and keep beside it) a report.

    Columns: input_ids (list of int32: prompt then response with its end mark), prompt_tokens (int32), prompt and
    response (the texts). Rows without a prompt or a response are left out and counted, bad ones listed.
    """
    import pyarrow as pa

    columns = (data.prompt_column, data.response_column)
    report: dict[str, Any] = {
        "file": str(source), "rows": 0, "empty": 0, "bad": 0, "bad_rows": [],
        "prompts_shortened": 0, "responses_cut": 0, "tokens": 0, "target_tokens": 0, "longest": 0,
    }  # fmt: skip
    schema = pa.schema(
        [
            ("input_ids", pa.list_(pa.int32())), ("prompt_tokens", pa.int32()),
            ("prompt", pa.string()), ("response", pa.string()),
        ]
    )  # fmt: skip
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".rows-", dir=target.parent)
    os.close(handle)
    try:
        with pa.OSFile(name, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for texts in _chunks(source, columns, report):
                prompts, shortened = encoder.encode_prompts([p for p, _ in texts], data.max_source_length)
                responses, cut = encoder.encode_responses([r for _, r in texts], data.max_target_length)
                ids = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
                report["rows"] += len(ids)
                report["prompts_shortened"] += shortened
                report["responses_cut"] += cut
                report["tokens"] += sum(map(len, ids))
                report["target_tokens"] += sum(map(len, responses))
                report["longest"] = max([report["longest"], *map(len, ids)])
                batch = [ids, [len(p) for p in prompts], [p for p, _ in texts], [r for _, r in texts]]
                writer.write_batch(pa.record_batch(batch, schema=schema))
        if report["rows"] == 0:
            raise DsrunError("no row has both a prompt and a response", where=str(source))
        Path(f"{target}.json").write_text(json.dumps(report, ensure_ascii=False, indent=2), encoding="utf-8")
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)
    return report


def _chunks(
    source: Path, columns: tuple[str, str], report: dict[str, Any]
) -> Iterator[list[tuple[str, str]]]:
    chunk: list[tuple[str, str]] = []
    for number, row in read_rows(source):
        texts = texts_of(row, columns)
        if texts is not None:
            chunk.append(texts)
        elif isinstance(row, BadRowError):
            report["bad"] += 1
            if len(report["bad_rows"]) < 1000:
                report["bad_rows"].append({"row": number, "why": str(row)})
        else:
            report["empty"] += 1
        if len(chunk) == CHUNK_ROWS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def describe(report: dict[str, Any]) -> str:
    """The report in a line."""
    text = f"{report['rows']:,} rows, {report['tokens']:,} tokens, longest {report['longest']}"
    for key, words in (
        ("empty", "without a prompt or a response left out"),
        ("bad", "unreadable left out"),
        ("prompts_shortened", "prompts shortened to fit --max-source-length"),
        ("responses_cut", "responses cut to fit --max-target-length"),
    ):
        if report[key]:
            text += f"; {report[key]:,} {words}"
    return text


if __name__ == "__main__":
    sys.exit(main())
