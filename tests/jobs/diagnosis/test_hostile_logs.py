"""Texts that want to break the reader: nothing but an answer or one clear message may come of them."""

from __future__ import annotations

import io
import random
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from dsrun.errors import DsrunError
from dsrun.files import json_text
from dsrun.jobs.diagnosis.diagnosis import diagnose_files
from dsrun.jobs.diagnosis.signatures import find_signatures
from dsrun.jobs.diagnosis.signatures.literals import needed

EXAMPLES = [example for one in find_signatures().values() for example in one.examples]
PIECES = [
    b"\x00", b"\r", b"\n", b"\r\n", b"\xff\xfe", b"\x1b[31m", b"\x1b]0;", b"\xe5", "中文".encode(),
    b"{", b"}", b"{0}",
    b"%s", b"[rank0]: ", b"[rank99999999]: ", b"Traceback (most recent call last):\n",
    b'  File "a", line 7\n',
    b"\xf0\x9f\x92\xa5", b"Root Cause (first observed failure):\n  rank      : x\n",
    b"  time      : 2025-99-99_99:99:99\n",
    b"rank      : 7\n",
    b"During handling of the above exception, another exception occurred:\n", b"Error: " * 50,
    b"2024-02-30 25:61:61 ",
    b"Tried to allocate 1.2.3 GiB", b"(" * 99, b"a" * 9000, b"1" * 400,
    b"exits with return code = -99999999999", b": " * 40,
]  # fmt: skip


def hostile(seed):
    """A text of pieces of real failures and of what stands between them in no log."""
    draw = random.Random(seed)
    parts = []
    for _ in range(draw.randint(0, 12)):
        text = draw.choice(EXAMPLES).encode() if draw.random() < 0.5 else draw.choice(PIECES)
        cut = draw.randint(0, len(text))
        parts += [
            text[:cut],
            draw.choice(PIECES) if draw.random() < 0.5 else b"",
            text[cut:],
            draw.choice([b"\n", b"", b"\r"]),
        ]
    if draw.random() < 0.1:
        parts.append(draw.randbytes(draw.randint(1, 3000)))
    return b"".join(parts)


def answer(text, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    try:
        found = diagnose_files(["-"], {"LANG": "C"})
    except DsrunError as error:
        assert "stdin" in str(error)
        return
    assert found.summary and found.next_step
    assert (found.cause is None) == (found.confidence == "none")
    json_text(asdict(found)).encode()


@pytest.mark.parametrize(
    "many", [range(400), pytest.param(range(400, 10_000), marks=pytest.mark.full)], ids=["few", "all"]
)
def test_hostile_texts(many, monkeypatch):
    for seed in many:
        try:
            answer(hostile(seed), monkeypatch)
        except Exception as error:
            pytest.fail(f"hostile({seed}): {type(error).__name__}: {error}")


NEAR = [
    "CUDA out of memor", "Detected 1 oom_kil", "exits with return code =", "Target modules ",
    "Watchdog caught collective",
    "Command 'ssh ", "srun: error: ", "sbatch: error: ", "cannot import name '", "store based barrier ",
    "size mismatch for a",
    "No such file or directory: '", "expected param ", "Input type ", "Access to model ", "40",
    "[rank1]: ", "2024-01-01 00:00:0",
]  # fmt: skip


@pytest.mark.parametrize("near", NEAR)
def test_near_misses_again_and_again_in_one_line(near, monkeypatch):
    """Patterns that looked again from each of them would not come to an end."""
    answer((near * (3_000_000 // len(near))).encode(), monkeypatch)


def test_all_texts_of_all_signatures_in_every_line(monkeypatch):
    texts = b" ".join(text for one in find_signatures().values() for text in sorted(needed(one.pattern)))
    answer(b"".join(b"%d %b\n" % (number, texts) for number in range(20)), monkeypatch)


def test_secrets_are_hidden(monkeypatch):
    secrets = [
        "hf_abcdefghijklmnop", "sk-proj-abcdefghijklmnop", "token=abcdef123456", "https://me:hunter2222@host/x",
        "Authorization: Bearer abc.def.ghi", '"api_key": "0123456789abcdef"',
    ]  # fmt: skip
    line = "OSError: [Errno 28] No space left on device " + " ".join(secrets)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(line.encode())))
    shown = json_text(asdict(diagnose_files(["-"], {})))
    hidden = ("abcdefghijklmnop", "abcdef123456", "hunter2222", "abc.def.ghi", "0123456789abcdef")
    assert not [secret for secret in hidden if secret in shown]
    assert "No space left" in shown


@pytest.mark.parametrize("seed", range(3))
def test_a_file_of_numbers_is_no_log(seed, tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(random.Random(seed).randbytes(20_000) + bytes(60_000))
    with pytest.raises(DsrunError, match="is not a text"):
        diagnose_files([str(file)], {})


@pytest.mark.parametrize("encoding", ["gbk", "utf-16", "utf-8-sig"])
def test_a_log_in_another_encoding_is_one(encoding, tmp_path):
    file = tmp_path / "job.log"
    file.write_bytes(("\x1b[32m步骤 12\x1b[0m 损失 2.5\n" * 50).encode(encoding))
    assert diagnose_files([str(file)], {}).cause is None
