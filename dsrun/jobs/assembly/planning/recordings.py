"""Recordings of a model's step: made by a process of its own, which imports torch, and kept in the cache.

A recording's name is made of what is asked and of the versions whose code is traced: another release is traced anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import dsrun
from dsrun import packages
from dsrun.data.cache import cache_root
from dsrun.errors import DsrunError
from dsrun.files import json_text, write_atomic

PACKAGES = ("torch", "transformers", "peft")
"""The packages whose code is traced."""
PASSING = ("MemoryError", "OSError")
"""Faults that another time may not have: they are not kept."""
TIME_LIMIT_S = 25.0
"""Seconds that recording may take in all: two quiet cores need a third of them."""


def key_of(request: Mapping[str, Any]) -> str:
    """A name for a recording: of what is asked, and of the code that answers."""
    versions = {name: packages.installed_version(name) for name in PACKAGES}
    text = json.dumps([_own_code(), versions, request], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _own_code() -> str:
    """A name for dsrun's own code that makes recordings: once it is changed, old entries of the cache aren't found."""
    digest = hashlib.sha256()
    training = Path(dsrun.__file__).parent / "training"
    for path in (*sorted((training / "tracing").glob("*.py")), training / "models" / "adapters.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def record(requests: Mapping[str, Mapping[str, Any]], limit_s: float) -> str:
    """Make recordings, by their keys, and put them into the cache; returns why some are missing, or nothing."""
    absent = [name for name in PACKAGES[:2] if packages.installed_version(name) is None]
    if absent:
        return f"not installed: {' and '.join(absent)}"
    answers, why = _answers(list(requests.values()), limit_s)
    for key, answer in zip(requests, answers, strict=False):
        _ANSWERS[key] = answer
        if str(answer.get("error")).startswith(PASSING):
            continue
        with suppress(DsrunError, OSError):  # a cache that can't be written costs the next plan a trace
            _path(key).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(_path(key), json_text(answer))
    return why if len(answers) < len(requests) else ""


_ANSWERS: dict[str, Any] = {}
"""Answers of this process's recordings: the cache may not be writable."""


def cached(key: str) -> Mapping[str, Any] | None:
    """The answer for a key; None where there is none, or a damaged one."""
    if key in _ANSWERS:
        return _ANSWERS[key]  # type: ignore[no-any-return]
    try:
        answer = json.loads(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return (
        answer if isinstance(answer, dict) and answer.keys() & {"recording", "described", "error"} else None
    )


def _path(key: str) -> Path:
    return cache_root() / "traces" / f"{key}.json"


def _answers(requests: Sequence[Mapping[str, Any]], limit_s: float) -> tuple[list[Any], str]:
    """The process's answers, as many as came in time, and why others are missing."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dsrun.training.tracing.process"]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, input=json.dumps(requests), capture_output=True, text=True, check=False, env=environ,
            timeout=limit_s,
        )  # fmt: skip
        stdout = done.stdout
        last = done.stderr.strip().splitlines()[-1:]
        why = f"the tracing process ended after {time.monotonic() - began:.0f} s: {' '.join(last)[:200]}"
    except subprocess.TimeoutExpired as error:
        stdout = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        why = f"tracing took more than {limit_s:.0f} s"
    except OSError as error:
        return [], f"the tracing process can't be started: {error.strerror}"
    answers = []
    with suppress(ValueError):  # the last line of a process that was stopped may be half one
        for line in stdout.splitlines():
            answers.append(json.loads(line))
    return answers, why


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a network that transformers has a class for, as dsrun.planner.shape.described takes them.

    Raises DsrunError with the reason where there are none.
    """
    request = {"describe": dict(config)}
    key = key_of(request)
    why = "" if cached(key) else record({key: request}, TIME_LIMIT_S)
    answer = cached(key) or {"error": why}
    if "described" not in answer:
        raise DsrunError(f"can't be traced: {answer.get('error')}")
    return dict(answer["described"])
