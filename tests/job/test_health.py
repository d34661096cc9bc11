"""Slow ranks and hosts, by what each rank waited in a run's steps."""

from __future__ import annotations

import json

import pytest

from dsrun.job import health
from dsrun.job.job import HostDevices

ONE_HOST = (HostDevices("localhost", (0, 1, 2, 3)),)
TWO_HOSTS = (HostDevices("n1", (0, 1)), HostDevices("n2", (0, 1)))


def lines(*waited, steps=10, seconds=1.0):
    return [{"step": step, "seconds": seconds, "waited": list(waited)} for step in range(steps)]


@pytest.mark.parametrize(
    ("hosts", "waited", "slow", "host"),
    [
        (ONE_HOST, (0.5, 0.5, 0.05, 0.5), (2,), None),
        (ONE_HOST, (0.1, 0.12, 0.08, 0.1), (), None),
        (TWO_HOSTS, (0.5, 0.5, 0.1, 0.05), (2, 3), "n2"),
        (TWO_HOSTS, (0.5, 0.5, 0.5, 0.05), (3,), None),
        ((HostDevices("localhost", (0, 1)),), (0.6, 0.01), (1,), None),
    ],
)
def test_who_waits_least_is_slow(hosts, waited, slow, host):
    found = health.judged(lines(*waited), hosts)
    assert (found.slow, found.host) == (slow, host)
    assert bool(found.words) == bool(found.words_zh) == bool(slow)
    assert found.computing_seconds == pytest.approx([1 - seconds for seconds in waited])


def test_a_rank_that_was_late_now_and_then_is_not_slow():
    steps = [*lines(0.5, 0.05, steps=5), *lines(0.05, 0.5, steps=5)]
    assert health.judged(steps, (HostDevices("localhost", (0, 1)),)).slow == ()


def test_what_does_not_fit_tells_nothing():
    assert health.judged(lines(0.5, 0.1), ONE_HOST) is None
    assert health.judged(lines(0.5, 0.1, 0.5, 0.5, steps=health.FEWEST_STEPS - 1), ONE_HOST) is None
    broken = [*lines(0.5, 0.1, 0.5, 0.5), {"step": 11}, {"seconds": "x", "waited": [1, 2, 3, None]}]
    assert health.judged(broken, ONE_HOST).steps == 10


def test_it_is_read_from_a_runs_folder(tmp_path):
    assert health.read(tmp_path, ONE_HOST) is None
    text = "".join(json.dumps(line) + "\n" for line in lines(0.5, 0.5, 0.05, 0.5))
    (tmp_path / health.WAITS).write_text(text + '{"step": 1')
    found = health.read(tmp_path, ONE_HOST)
    assert found.words.startswith("rank 2 is slow: 0.95 s of computing a step, the others 0.5 s")
