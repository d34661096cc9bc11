"""Stacks of ranks that others waited for: read, told apart, and named in the diagnosis."""

from __future__ import annotations

import pytest

from dsrun.job.layout import stack_file
from dsrun.job.run_folder import rank_log
from dsrun.jobs.diagnosis import run_logs
from dsrun.jobs.diagnosis.causes import diagnose
from dsrun.jobs.diagnosis.ends import HostEnd, RankEnd, may_have_waited, timed_out
from dsrun.jobs.diagnosis.reading import stacks

TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] "
    "Timed out waiting 6000ms for recv operation to complete"
)
STARTS = """  File "/opt/dsrun/jobs/supervision/rank.py", line 79 in main
  File "<frozen runpy>", line 198 in _run_module_as_main
"""
OTHER_THREAD = """Thread 0x00007ff664d996c0 (most recent call first):
  File "/opt/dsrun/job/log_parts.py", line 137 in _keep
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

"""
STUCK = f"""{OTHER_THREAD}Current thread 0x00007ff666460b80 (most recent call first):
  File "/home/u/train.py", line 14 in stuck
  File "/home/u/train.py", line 29 in <module>
{STARTS}"""
WAITING = f"""{OTHER_THREAD}Current thread 0x00007ff666460b80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/u/train.py", line 21 in step
{STARTS}"""
BY_PY_SPY = """Process 4711: /usr/bin/python3 -u train.py
Python v3.9.2 (/usr/bin/python3.9)

Thread 4711 (idle): "MainThread"
    stuck (train.py:14)
    <module> (train.py:29)
Thread 4712 (idle): "Thread-1"
    wait (threading.py:306)
"""


@pytest.fixture
def run(tmp_path):
    """A run folder in which stacks and logs can be put."""

    def put(dumps, logs=()):
        (tmp_path / "state").mkdir()
        (tmp_path / "logs").mkdir()
        for rank, text in dumps.items():
            (tmp_path / stack_file(rank)).write_text(text)
        for rank, text in dict(logs).items():
            (tmp_path / rank_log(rank)).write_text(text)
        return tmp_path

    return put


@pytest.mark.parametrize(
    ("text", "place"), [(STUCK, "stuck (/home/u/train.py:14)"), (BY_PY_SPY, "stuck (train.py:14)")]
)
def test_the_main_threads_stack_is_read(run, text, place):
    stack, *others = stacks.taken(run({1: text, 0: ""}))
    assert (stack.rank, stack.place, others) == (1, place, [])
    assert len(stack.calls) == 2
    assert not stack.waits


def test_a_dump_that_was_cut_off_is_none(run):
    assert stacks.taken(run({1: STUCK[:150]})) == []


def test_who_stands_in_a_collective_waits_too(run):
    folder = run({1: STUCK, 2: WAITING})
    assert [stack.rank for stack in stacks.hanging(folder, {0})] == [1]


def test_where_all_stand_in_collectives_they_are_different_ones(run):
    found = stacks.hanging(run({1: WAITING, 0: WAITING}), {0})
    assert [stack.rank for stack in found] == [1]
    assert "stood in another collective, in step (/home/u/train.py:21)" in stacks.hanging_in_words(found)


def test_a_time_out_is_told_from_a_lost_connection():
    assert timed_out(TIMED_OUT)
    assert not timed_out("RuntimeError: Connection closed by peer")
    assert not timed_out("ValueError: Timed out waiting 6000ms")
    assert may_have_waited(RankEnd(0, 1.0, "", killed=True))


@pytest.mark.parametrize(
    ("end", "log"),
    [
        (RankEnd(0, 1.0, TIMED_OUT, killed=False, code=1), ""),
        (
            RankEnd(0, 1.0, "", killed=True, code=-6),
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)\n",
        ),
    ],
)
def test_the_rank_that_hangs_is_named_and_not_the_one_that_waited(make_job, run, end, log):
    folder = run({1: STUCK}, {0: log, 1: "step 1\n"})
    cause = diagnose(make_job(folder), [end], [HostEnd(0, 1)])
    assert (cause.name, cause.rank, cause.exit_code) == ("rank-hangs", 1, end.code)
    wanted = "rank 1 hangs in stuck (/home/u/train.py:14); rank 0 waited in a collective"
    assert cause.problem.what.startswith(wanted)
    assert 'File "/home/u/train.py", line 29 in <module>' in cause.problem.what


def test_without_a_stack_the_one_that_waited_is_all_there_is(make_job, run):
    end = RankEnd(0, 1.0, TIMED_OUT, killed=False, code=1)
    assert diagnose(make_job(run({})), [end], [HostEnd(0, 1)]).name == "rank-failed"


@pytest.mark.parametrize(
    ("language", "words"), [("C", "Rank 1 hangs in stuck"), ("zh_CN.UTF-8", "进程 1 卡在 stuck")]
)
def test_the_diagnosis_names_it(run, language, words):
    folder = run({1: STUCK}, {0: f"Traceback (most recent call last):\n{TIMED_OUT}\n", 1: "step 1\n"})
    said = f"rank 0 failed first: {TIMED_OUT}"
    diagnosis = run_logs.of_run(folder, rank=0, said=said, environ={"LANG": language})
    assert (diagnosis.cause, diagnosis.rank, diagnosis.confidence) == ("collective_timeout", 1, "high")
    assert words in diagnosis.summary
    assert diagnosis.stack[0] == 'File "/home/u/train.py", line 14 in stuck'
