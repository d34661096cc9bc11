"""The run's folder: who may use it, and what state it is in."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from pathlib import Path

import pytest
from running import own_disk_at, waiting_processes

from dsrun.errors import DsrunError
from dsrun.job import run_folder

HOLD = """
import sys
import threading
from pathlib import Path
from dsrun.job import run_folder
with run_folder.held(Path(sys.argv[1])):
    run_folder.write_state(Path(sys.argv[1]), sys.argv[2])
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "a user's 运行"


@pytest.fixture
def holder(run_dir):
    """`holder(state)`: another process that holds the run folder."""
    with waiting_processes() as start:
        yield lambda state="running": start(HOLD, str(run_dir), state, says="held")


def test_on_a_full_disk_the_state_is_told_in_the_room_that_it_has(tmp_path):
    with own_disk_at(tmp_path, 1 << 20) as disk:
        if disk is None:
            pytest.skip("only root may mount a disk")
        run_folder.write_state(disk, "running", restarts=0, more="x" * 300)
        with (disk / "full").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        run_folder.write_state(disk, "failed", why="the disk is full", problems=["long" * 2000])
        record = json.loads((disk / run_folder.STATE).read_text(encoding="utf-8"))
        assert (record["state"], record["why"]) == ("failed", "the disk is full")
        run_folder.write_state(disk, "interrupted")
        assert run_folder.describe_state(disk) == "interrupted"


def the_problem(run_dir):
    (problem,) = run_folder.check_new(run_dir)
    assert problem.where == str(run_dir)
    return problem


def test_a_new_folder_is_fine_and_not_made_by_asking(run_dir, tmp_path):
    assert run_folder.check_new(run_dir) == []
    assert run_folder.check_new(run_dir / "deep" / "deeper") == []
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_fine(run_dir):
    run_dir.mkdir()
    assert run_folder.check_new(run_dir) == []


def test_what_a_start_left_that_failed_early_is_in_nobodys_way(run_dir):
    with run_folder.held(run_dir):
        pass
    (run_dir / run_folder.OWN_LOG).touch()
    temporary = run_dir / ".job.json.0123456789ab.tmp"
    temporary.touch()
    assert run_folder.check_new(run_dir) == []
    with run_folder.held(run_dir):
        assert not temporary.exists()
    (run_dir / run_folder.LOGS / "rank-0.log").touch()
    assert "not empty" in the_problem(run_dir).what


def test_a_relative_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_folder.check_new(Path("runs") / "a") == []


def test_a_folder_with_something_in_it(run_dir):
    run_dir.mkdir()
    (run_dir / "thesis.tex").touch()
    assert "--output-dir" in the_problem(run_dir).hint


def test_a_file(run_dir):
    run_dir.touch()
    assert "not a folder" in the_problem(run_dir).what


def test_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    assert the_problem(tmp_path / "file" / "run").what


def test_a_run_is_continued_or_left_alone(run_dir):
    with run_folder.held(run_dir):
        (run_dir / run_folder.JOB).touch()
        run_folder.write_state(run_dir, "failed")
    problem = the_problem(run_dir)
    assert "failed" in problem.what
    assert "--resume" in problem.hint
    assert "--output-dir" in problem.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o555)
    assert "not writable" in the_problem(tmp_path / "theirs" / "run").what


def test_a_folder_in_use(run_dir, holder):
    process = holder()
    assert run_folder.in_use(run_dir)
    assert "another dsrun" in the_problem(run_dir).what
    with pytest.raises(DsrunError, match="another dsrun"), run_folder.held(run_dir):
        pass
    assert run_folder.describe_state(run_dir) == "running"
    process.kill()
    process.wait()
    assert not run_folder.in_use(run_dir)
    with run_folder.held(run_dir):
        assert run_folder.in_use(run_dir)


@pytest.mark.parametrize("state", ["preparing", "running"])
def test_a_dead_dsrun_was_interrupted(run_dir, holder, state):
    process = holder(state)
    assert run_folder.describe_state(run_dir) == state
    process.kill()
    process.wait()
    assert run_folder.describe_state(run_dir) == "interrupted"


@pytest.mark.parametrize("state", ["finished", "failed", "interrupted"])
def test_an_end_stays_an_end(run_dir, state):
    with run_folder.held(run_dir):
        run_folder.write_state(run_dir, state, result={"loss": 1.5})
    assert run_folder.describe_state(run_dir) == state
    assert json.loads((run_dir / run_folder.STATE).read_text())["result"] == {"loss": 1.5}


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '"x"', "3"])
def test_without_a_state(run_dir, content):
    run_dir.mkdir()
    if content is not None:
        (run_dir / run_folder.STATE).write_text(content)
    assert run_folder.describe_state(run_dir) == "not started"


def test_looking_is_no_holding(run_dir):
    with run_folder.held(run_dir):
        pass
    assert not run_folder.in_use(run_dir)
    assert not run_folder.in_use(run_dir / "none")


def test_holding_where_a_file_is(run_dir):
    run_dir.touch()
    with pytest.raises(DsrunError, match="can't be written"), run_folder.held(run_dir):
        pass


# The follower


@pytest.fixture
def log(tmp_path):
    return tmp_path / "metrics.jsonl"


def append(path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_only_what_was_added(log):
    follower = run_folder.Follower(log)
    assert follower.lines() == []
    append(log, '{"a": 1}\n{"a": 2}\n')
    assert follower.lines() == [{"a": 1}, {"a": 2}]
    assert follower.lines() == []
    append(log, '{"a": "三"}\n')
    assert follower.lines() == [{"a": "三"}]


def test_half_a_line_waits_for_the_other_half(log):
    follower = run_folder.Follower(log)
    whole = '{"a": "三"}\n'.encode()
    for cut in range(1, len(whole)):
        with log.open("ab") as file:
            file.write(whole[:cut])
        assert follower.lines() == []
        with log.open("ab") as file:
            file.write(whole[cut:])
        assert follower.lines() == [{"a": "三"}]


@pytest.mark.parametrize("size", [1, 7, 10, 11, 1000])
def test_a_file_is_read_in_blocks(log, monkeypatch, size):
    """Whose borders lie anywhere in a line."""
    monkeypatch.setattr(run_folder, "BLOCK_BYTES", size)
    follower = run_folder.Follower(log)
    append(log, '{"a": "三"}\n{"a": 2}\n{"a"')
    assert follower.lines() == [{"a": "三"}, {"a": 2}]
    append(log, ': 3}\n{"a": 4}')
    assert follower.lines() == [{"a": 3}]
    append(log, "\n")
    assert [list(block) for block in follower.blocks() if block] == [[{"a": 4}]]


def test_from_the_end(log):
    append(log, '{"a": 1}\n')
    follower = run_folder.Follower(log, from_end=True)
    append(log, '{"a": 2}\n')
    assert follower.lines() == [{"a": 2}]


def test_a_file_that_was_cut_and_grew_again_between_two_looks(log):
    # A resumed run drops the lines after its checkpoint, in a new file, and writes them again.
    append(log, '{"step": 1, "loss": 7.25}\n{"step": 2, "loss": 7.125}\n')
    follower = run_folder.Follower(log, from_end=True)
    new = log.with_suffix(".new")
    append(new, '{"step": 1, "loss": 7.25}\n{"step": 2, "loss": 7.0}\n{"step": 3, "loss": 6.5}\n')
    new.replace(log)
    lines = follower.lines()
    assert lines[-1] == {"step": 3, "loss": 6.5}
    assert {"step": 2, "loss": 7.0} in lines


def test_a_line_that_a_full_disk_broke_is_passed_over(log):
    append(log, '{"a": 1}\n{"a": 2, "b"')
    follower = run_folder.Follower(log)
    assert follower.lines() == [{"a": 1}]
    append(log, '{"a": 3}\n{"a": 4}\n')  # a resumed run goes on in the same line
    assert follower.lines() == [{"a": 4}]


@pytest.mark.parametrize("most", [1, 2, 500])
def test_lines_are_judged_alone_however_many_are_read_at_once(monkeypatch, most):
    """Halves that would be an object together, two objects in a line, other values, bytes that are no text."""
    monkeypatch.setattr(run_folder, "LINES_AT_ONCE", most)
    lines = [
        b'{"a": 1}',
        b'{"b": 1',
        b'"c": 2}',
        b'{"d": 1},{"e": 1}',
        b"[1]",
        b"",
        b'{"f": NaN}',
        b'"\xff"',
        b'{"g": 2}',
    ]
    found = run_folder.json_objects(b"\n".join([*lines, b'{"half": 1']))
    assert [list(one) for one in found] == [["a"], ["f"], ["g"]]


def test_who_only_looks_is_in_nobodys_way(tmp_path):
    with run_folder.held(tmp_path):
        pass
    with (tmp_path / run_folder.LOCK).open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        release = threading.Timer(0.1, lambda: fcntl.flock(looking, fcntl.LOCK_UN))
        release.start()
        with run_folder.held(tmp_path):
            assert run_folder.in_use(tmp_path)
        release.join()
        fcntl.flock(looking, fcntl.LOCK_SH)
        with pytest.raises(DsrunError, match="another dsrun"), run_folder.held(tmp_path):
            pass
