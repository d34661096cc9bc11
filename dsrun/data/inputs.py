"""The files that a run is made of: its data, its tokenizer and the weights that it starts from.

They are read when a run is planned, and job.json has their sizes, times and digests. Whoever reads them again (a run
that goes on or is repeated, another host, command.sh) compares: first sizes and times, then content.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from dsrun.errors import Problem, raise_all
from dsrun.files import explained
from dsrun.job.job import DataSpec, InputFile, Inputs, Job, ModelSpec

KINDS = ("train", "eval", "tokenizer", "config", "weights", "adapter")
TRAIN, EVAL, TOKENIZER, CONFIG, WEIGHTS, ADAPTER = KINDS
OF_MODEL = (TOKENIZER, CONFIG, WEIGHTS)
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
ADAPTER_FILES = ("adapter_config.json", "config.json", "*.safetensors", "*.bin")
BLOCK_BYTES = 1 << 20
SAMPLES, SAMPLE_BYTES = 128, 128 << 10
"""Samples of a large file of weights, evenly from its header to its end: how many, and the bytes of each. Training
changes a file everywhere, so samples will do; to read all of a large model would take minutes, at every start."""
WHOLE_BYTES = SAMPLES * SAMPLE_BYTES
"""The size up to which files of weights are read whole."""


class ChangedFile(NamedTuple):
    """A file that is not what it was."""

    kind: str
    path: str
    before: InputFile | None
    """None where there was no such file."""
    now: InputFile | None
    """None where it is gone."""


def read_inputs(
    model: ModelSpec,
    data: DataSpec,
    adapter: str | None = None,
    *,
    kinds: Collection[str] = KINDS,
    known: Inputs | None = None,
) -> Inputs:
    """The files of these kinds as they are here and now.

    known: the record to compare with: a file of the same size and time is taken to have the same content. Files that
    are gone are left out. Raises DsrunError for one that can't be read.
    """
    recorded = {(file.kind, file.path): file for file in known.files} if known else {}
    files = []
    for kind, path in _paths(model, data, adapter):
        with explained("can't be read", path):
            if kind in kinds and path.exists():
                files.append(_file(kind, path, recorded.get((kind, str(path)))))
    return Inputs(socket.gethostname(), tuple(files))


def read_all(
    model: ModelSpec, data: DataSpec, adapter: str | None = None, *, known: Inputs | None = None
) -> Inputs:
    """The files of all kinds. Raises DsrunError also where a file is gone without which there is no run."""
    raise_all(Problem("is gone", path) for path in needed(model, data, adapter) if not Path(path).exists())
    return read_inputs(model, data, adapter, known=known)


def needed(model: ModelSpec, data: DataSpec, adapter: str | None = None) -> list[str]:
    """The files and folders without which there is no run."""
    places = [model.location] if model.source in ("folder", "chatglm", "gguf") else []
    return [*data.train_files, *filter(None, [data.eval_file, adapter]), *places]


def data_files(data: DataSpec, kind: str, digests: Iterable[str]) -> list[InputFile]:
    """The data files of a kind as they were read, with their digests."""
    paths = [path for kind_of_path, path in _paths_of_data(data) if kind_of_path == kind]
    files = []
    for path, digest in zip(paths, digests, strict=True):
        with explained("can't be read", path):
            stat = path.stat()
        files.append(InputFile(str(path), kind, stat.st_size, stat.st_mtime_ns, digest))
    return files


def _paths_of_data(data: DataSpec) -> Iterator[tuple[str, Path]]:
    yield from ((TRAIN, Path(path)) for path in data.train_files)
    if data.eval_file:
        yield EVAL, Path(data.eval_file)


def _paths(model: ModelSpec, data: DataSpec, adapter: str | None) -> Iterator[tuple[str, Path]]:
    """The files with their kinds, always in this order: `cache.named` makes names of their digests in a row."""
    yield from _paths_of_data(data)
    location = Path(model.location)
    if model.source == "random":
        yield from ((TOKENIZER, path) for path in sorted(Path(model.tokenizer["corpus"]).glob("*.jsonl")))
    elif model.source == "gguf":
        yield WEIGHTS, location
    elif model.source == "chatglm":
        yield TOKENIZER, location / "tokenizer.model"
    elif model.source == "folder":
        yield from ((TOKENIZER, location / name) for name in TOKENIZER_FILES)
        yield CONFIG, location / "config.json"
    if model.source in ("folder", "chatglm"):
        yield from ((WEIGHTS, path) for path in _weights(location))
    if adapter and Path(adapter).is_file():
        yield ADAPTER, Path(adapter)
    elif adapter:
        names = (name for pattern in ADAPTER_FILES for name in sorted(Path(adapter).glob(pattern)))
        yield from ((ADAPTER, path) for path in names)


def _weights(folder: Path) -> list[Path]:
    """The files that the model is loaded from. A second copy in the older format, as many folders have, is left."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _file(kind: str, path: Path, recorded: InputFile | None) -> InputFile:
    stat = path.stat()
    same = recorded is not None and (recorded.size, recorded.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    digest = recorded.digest if recorded and same else digest_of(path, kind)
    return InputFile(str(path), kind, stat.st_size, stat.st_mtime_ns, digest)


def digest_of(path: Path, kind: str) -> str:
    """The SHA-256 of a file's content; of more than WHOLE_BYTES of weights, of its size and its samples."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if kind not in (WEIGHTS, ADAPTER) or size <= WHOLE_BYTES:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
            return digest.hexdigest()
        digest.update(str(size).encode())
        for number in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def is_sampled(file: InputFile) -> bool:
    """Whether the digest is of samples only."""
    return file.kind in (WEIGHTS, ADAPTER) and file.size > WHOLE_BYTES


def differences(before: Inputs, now: Inputs, kinds: Collection[str] = KINDS) -> list[ChangedFile]:
    """The files of these kinds whose content is not what it was, gone ones and new ones among them."""
    old, new = ({(file.kind, file.path): file for file in inputs.files} for inputs in (before, now))
    return [
        ChangedFile(*key, old.get(key), new.get(key))
        for key in dict.fromkeys([*old, *new])
        if key[0] in kinds and (key not in old or key not in new or _content(old[key]) != _content(new[key]))
    ]


def _content(file: InputFile) -> tuple[int, str]:
    return file.size, file.digest


def read_in_place(job: Job) -> bool:
    """Whether the model's folder is used where it is, and nothing is made of it in the cache."""
    return job.model.source == "folder" and not job.model.special_tokens


def kinds_read(job: Job, *, from_checkpoint: bool) -> set[str]:
    """The kinds of files that the job's ranks read: those that neither the cache nor a checkpoint stands for.

    from_checkpoint: whether the trained weights are loaded from a checkpoint.
    """
    prepared = job.prepared
    rows = ((TRAIN, prepared.train_rows), (EVAL, prepared.eval_rows))
    kinds = {kind for kind, path in rows if path and not Path(path).exists()}
    if read_in_place(job) or not Path(prepared.model_dir).exists():
        kinds |= {TOKENIZER, CONFIG}
    if not Path(prepared.model_dir).exists():
        kinds.add(WEIGHTS)
    # Loaded from where they are, also where the cache has a folder with new tokens: it links to them.
    if job.model.source in ("folder", "chatglm") and (job.peft.freezes or not from_checkpoint):
        kinds.add(WEIGHTS)
    return kinds if from_checkpoint else {*kinds, ADAPTER}


def check(job: Job, kinds: Collection[str], *, trust_times: bool) -> None:
    """Raise DsrunError where files of these kinds are not, on this host, what the job was planned with.

    trust_times: a file of the same size and time is taken to have the same content. A job of an older dsrun has no
    record to compare with.
    """
    before = job.prepared.inputs
    if before is not None:
        known = before if trust_times else None
        now = read_inputs(job.model, job.data, job.peft.adapter, kinds=kinds, known=known)
        raise_all(problems(before, now, kinds))


def check_model(job: Job, *, from_checkpoint: bool) -> None:
    """Raise DsrunError where the model's files on this host, which are loaded first, are not those of the plan."""
    kinds = kinds_read(job, from_checkpoint=from_checkpoint).difference((TRAIN, EVAL))
    check(job, kinds, trust_times=True)


NOUNS = {
    TRAIN: "the data", EVAL: "the data", TOKENIZER: "the tokenizer", CONFIG: "the model's config",
    WEIGHTS: "the model's weights", ADAPTER: "the adapter",
}  # fmt: skip


def problems(before: Inputs, now: Inputs, kinds: Collection[str] = KINDS) -> list[Problem]:
    """The differences as problems. A hint that several of them share stands below the last of these."""
    changed = differences(before, now, kinds)
    hints = [_hint(before.host, now.host, file) for file in changed]
    return [
        Problem(in_words(file, before.host, now.host), file.path, "" if hint in hints[place + 1 :] else hint)
        for place, (file, hint) in enumerate(zip(changed, hints, strict=True))
    ]


def in_words(changed: ChangedFile, host_before: str, host: str) -> str:
    """The difference of a file in words: that it is there, or its size, or its content."""
    elsewhere = host != host_before
    then = f"on {host_before}, where the run was planned" if elsewhere else "when the run was planned"
    here = f" on {host}" if elsewhere else ""
    if changed.now is None:
        return f"is not there{here}: {NOUNS[changed.kind]} that the run was planned with"
    if changed.before is None:
        return f"is read as a part of {NOUNS[changed.kind]}{here}, and was not there {then}"
    now, before = changed.now, changed.before
    if now.size != before.size:
        sizes = f"{now.size:,} bytes{here}, {before.size:,} {then}"
    elif is_sampled(now):
        sizes = f"{now.size:,} bytes as before, other ones{here} than {then}"
    else:
        digests = f"SHA-256 {now.digest[:12]}{here}, {before.digest[:12]} {then}"
        sizes = f"{now.size:,} bytes as before, other ones: {digests}"
    written = f"{datetime.fromtimestamp(now.mtime_ns / 1e9):%Y-%m-%d %H:%M:%S}"
    return f"is not {NOUNS[changed.kind]} that the run was planned with: {sizes} (written {written})"


def _hint(host_before: str, host: str, changed: ChangedFile) -> str:
    restore = "Take it away" if changed.before is None else "Put it back as it was"
    way_out = f"{restore}, or start a new run with what is there now: dsrun finetune."
    if host != host_before:  # whether the two share a disk can't be known here
        same = f"Every host has to read the same: copy {host_before}'s to {host}."
        return f"{same} If they share the folder it was changed since. {way_out}"
    return way_out
