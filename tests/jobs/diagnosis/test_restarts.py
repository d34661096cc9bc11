"""What --max-restarts starts again: not what can't get better, and all that may."""

from __future__ import annotations

import pytest

from dsrun.jobs.diagnosis.diagnosis import in_words
from dsrun.jobs.diagnosis.log_files import LogSource
from dsrun.jobs.diagnosis.reading.log_lines import peeled
from dsrun.jobs.diagnosis.signatures import SYMPTOM, SignatureIndex, find_signatures
from dsrun.jobs.diagnosis.verdict import judge

ALL = find_signatures()
INDEX = SignatureIndex(ALL)
CANT = [
    "config-key", "config-not-json", "batch-sizes", "accelerate-mismatch", "training-args", "argparse",
    "no-launcher", "script-not-found", "syntax-error", "recursion", "module-missing", "import-name",
    "python-too-old", "model-type", "dtype", "shapes-multiply", "two-devices", "embedding-index", "disk-full",
    "disk-quota", "read-only", "permission-denied", "gpu-oom", "gpu-oom-optimizer", "cpu-allocator",
    "kernel-oom-killer", "too-many-files", "hub-gated", "hub-token", "hub-no-such-name", "hub-bad-name",
    "weights-cut-off", "size-mismatch",
    "cuda-home", "ninja-missing", "no-kernel-image", "driver-old", "half-on-cpu", "fork-cuda", "optimizer-empty",
    "peft-targets", "peft-targets-missing", "column-missing", "json-decode",
]  # fmt: skip
"""Signatures of what stays as it is."""
MAY = [
    "port-in-use", "client-socket-timeout", "rendezvous", "store-barrier", "slurm-preempted", "slurm-time-limit",
    "k8s-evicted", "gpu-broken", "http-timeout", "hub-rate", "stale-file-handle", "transport-endpoint", "hangup",
    "interrupted", "loader-timeout", "operator-lock", "ib-completion", "gpu-exclusive", "gpu-oom-other-process",
    "no-resolve", "collective-timeout", "gloo-timeout", "recorder-behind", "killed-9", "peer-gone", "exit-code",
    "nccl-remote",
]  # fmt: skip
"""Signatures of what another moment, another host or nobody knows what may better."""


def said_of(text):
    lines = [peeled(0, number, line) for number, line in enumerate(text.split("\n"), 1)]
    return in_words(judge(lines, INDEX), [LogSource("log", None)], {})


@pytest.mark.parametrize(("names", "hopeless"), [(CANT, True), (MAY, False)], ids=["can't", "may"])
def test_what_gets_better(names, hopeless):
    wrong = [
        name for name in names for example in ALL[name].examples if said_of(example).is_hopeless != hopeless
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("error", "hopeless"),
    [
        ("TypeError: object of type 'int' has no len()", True),
        ("KeyError: 'peer'", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.jsonl'", True),
        ("OddError: nobody knows", False),
        ("RuntimeError: something else", False),
    ],
)
def test_exceptions_of_the_script(error, hopeless):
    text = f'Traceback (most recent call last):\n  File "/home/me/train.py", line 9, in <module>\n    main()\n{error}'
    assert said_of(text).is_hopeless == hopeless


def test_what_only_came_of_a_failure_is_never_said_with_high_confidence():
    said = [said_of(example) for one in ALL.values() if one.kind == SYMPTOM for example in one.examples]
    assert len(said) > 20
    assert not [one.signature for one in said if one.confidence == "high" and not one.is_certain]
