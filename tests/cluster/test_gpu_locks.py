"""A lock for each GPU: real files, real processes, and things in the way."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dsrun import catalog
from dsrun.cluster import gpu_locks
from dsrun.cluster.gpu_locks import LockHolder, holder_of, locked, this_process
from dsrun.cluster.gpu_use import BusyError
from dsrun.errors import DsrunError
from dsrun.job import run_folder

# Holds the GPUs argv[2:], says so (or that it can't), and stays until it's told to go on.
CHILD = """
import pathlib, subprocess, sys
from dsrun.cluster import gpu_locks
from dsrun.cluster.gpu_use import BusyError
gpu_locks.FOLDER = pathlib.Path(sys.argv[1])
sys.stdin.readline()
try:
    with gpu_locks.locked(sys.argv[2:], gpu_locks.this_process()):
        orphan = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, close_fds=False)
        print("held", orphan.pid, flush=True)
        sys.stdin.readline()
        orphan.kill()
except BusyError:
    print("busy", flush=True)
"""
ONE, TWO, THREE = "GPU-11111111-aaaa", "GPU-22222222-bbbb", "GPU-33333333-cccc"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    path = tmp_path / "all users' 锁"
    monkeypatch.setattr(gpu_locks, "FOLDER", path)
    return path


@pytest.fixture
def unseen(monkeypatch):
    """The holder's process can't be seen, as that of another container: its note is all there is."""
    monkeypatch.setattr(gpu_locks, "_locker", lambda _: None)


@pytest.fixture
def child(folder):
    """`child(*uuids)`: a process that will hold them as soon as it is told to."""
    started = []

    def start(*uuids):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), *uuids], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": str(catalog.PACKAGE.parent)},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def go(process) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process) -> list[str]:
    return process.stdout.readline().split()


def test_held_and_free_again(folder):
    who = this_process()
    assert holder_of(ONE) is None
    assert not folder.exists()
    with locked([ONE, TWO], who):
        assert holder_of(ONE) == holder_of(TWO) == who
        assert holder_of(THREE) is None
    assert holder_of(ONE) is holder_of(TWO) is None


def test_a_note_holds_no_path_and_its_own_user_sees_the_run_folder(folder, tmp_path):
    """Among the open files of the process that holds the lock."""
    with run_folder.held(tmp_path / "a run"), locked([ONE], this_process()):
        assert b"a run" not in (folder / f"{ONE}.lock").read_bytes()
        assert holder_of(ONE).run_dir == str(tmp_path / "a run")


def test_a_program_that_is_no_dsrun_is_named(folder):
    """The message doesn't name who wrote the note, which anybody can."""
    with locked([ONE], this_process()):
        pass
    path = folder / f"{ONE}.lock"
    path.write_text('{"user": "alice", "pid": 1, "since": "ever"}')
    holding = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print(1, flush=True); sys.stdin.read()"
    )
    alone = [os.path.realpath(sys.executable), "-I", "-c", holding, "/proc/self/fd/0"]
    with (
        path.open("r+") as file,
        subprocess.Popen(
            [*alone[:-1], f"/proc/{os.getpid()}/fd/{file.fileno()}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process,
    ):
        assert process.stdout.readline() == b"1\n"
        found = holder_of(ONE)
        assert found.pid == process.pid and "which is no dsrun" in str(found)
        with pytest.raises(BusyError) as caught, locked([ONE], this_process()):
            pass
        assert f"process {process.pid}" in str(caught.value) and gpu_locks.VARIABLE in str(caught.value)
        process.stdin.close()


def test_another_folder_of_locks(folder, tmp_path, monkeypatch):
    with locked([ONE], this_process()):
        monkeypatch.setenv(gpu_locks.VARIABLE, str(tmp_path / "ours"))
        assert holder_of(ONE) is None
        with locked([ONE], this_process()):
            assert (tmp_path / "ours" / f"{ONE}.lock").exists()


def test_all_users_can_use_it(folder):
    before = os.umask(0o077)
    try:
        with locked([ONE], this_process()):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o666]


def test_a_second_job_is_told_who_holds_the_gpu(unseen):
    with locked([ONE], LockHolder("alice", 99, since="2026-01-02 03:04")):
        with pytest.raises(BusyError) as caught, locked([TWO, ONE], this_process()):
            pass
        assert "alice's dsrun (pid 99, since 2026-01-02 03:04)" in str(caught.value)
        assert holder_of(TWO) is None  # all or none


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGABRT])
def test_a_killed_process_holds_nothing(child, number):
    process = child(ONE)
    go(process)
    said, orphan = answer(process)
    assert said == "held"
    assert holder_of(ONE).pid == process.pid
    process.send_signal(number)
    process.wait()
    try:
        os.kill(int(orphan), 0)  # its own child lives on, and has not inherited the lock
        assert holder_of(ONE) is None
        with locked([ONE], this_process()):
            pass
    finally:
        os.kill(int(orphan), signal.SIGKILL)


@pytest.mark.parametrize("wanted", [[(ONE,)] * 4, [(ONE, TWO), (TWO, ONE), (TWO, ONE)]])
def test_in_a_race_exactly_one_wins(child, wanted):
    processes = [child(*uuids) for uuids in wanted]
    for _ in range(3):  # let them get ready, so that they start together
        time.sleep(0.1)
    for process in processes:
        go(process)
    for _ in range(50):
        holder_of(ONE)  # who only asks disturbs nobody
    said = sorted(answer(process)[0] for process in processes)
    assert said == [*["busy"] * (len(wanted) - 1), "held"]


def test_different_gpus_at_once(child):
    processes = [child(ONE), child(TWO, THREE)]
    for process in processes:
        go(process)
    assert [answer(process)[0] for process in processes] == ["held", "held"]


def test_a_file_that_was_swept_away_is_made_anew(folder, unseen):
    with locked([ONE], this_process()):
        (folder / f"{ONE}.lock").unlink()
        with locked([ONE], LockHolder("bob", 5)):
            assert holder_of(ONE).user == "bob"


def test_a_file_that_is_swept_between_opening_and_locking(folder, monkeypatch):
    real, swept = gpu_locks._lock, []

    def lock(file, uuid):
        real(file, uuid)
        if not swept:
            swept.append(uuid)
            (folder / f"{uuid}.lock").unlink()

    monkeypatch.setattr(gpu_locks, "_lock", lock)
    with locked([ONE], this_process()):
        assert swept
        assert holder_of(ONE).pid == os.getpid()


@pytest.mark.parametrize("note", ["", "{", "[]", "null", '{"user": "x"}', '{"pid": "x"}', "\x00" * 9000])
def test_a_broken_note_names_nobody(folder, note, unseen):
    with locked([ONE], this_process()):
        (folder / f"{ONE}.lock").write_text(note)
        assert holder_of(ONE) == LockHolder()
        assert str(holder_of(ONE)) == "another dsrun"


def test_bytes_that_are_no_text(folder, unseen):
    with locked([ONE], this_process()):
        (folder / f"{ONE}.lock").write_bytes(b"\xff\xfe{")
        assert holder_of(ONE) == LockHolder()


# In the way


def refused(where) -> str:
    with pytest.raises(DsrunError) as caught, locked([ONE], this_process()):
        pass
    assert not isinstance(caught.value, BusyError)
    (problem,) = caught.value.problems
    assert problem.where == str(where)
    assert holder_of(ONE) is None
    return problem.what


def test_a_link_in_place_of_the_folder(folder, tmp_path):
    (tmp_path / "victim").mkdir(mode=0o777)
    folder.symlink_to(tmp_path / "victim")
    assert "a link" in refused(folder)
    assert list((tmp_path / "victim").iterdir()) == []


def test_a_file_in_place_of_the_folder(folder):
    folder.write_text("mine")
    refused(folder)
    assert folder.read_text() == "mine"


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1755])
def test_somebodys_own_folder(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    assert "own" in refused(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder away")
def test_a_strangers_folder(folder):
    folder.mkdir(mode=0o755)
    os.chown(folder, 4321, 4321)
    assert "user 4321" in refused(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a file away, and becomes another user")
@pytest.mark.parametrize("closed", ["folder", "file"])
def test_what_is_somebodys_own_is_named_with_whose_it_is(monkeypatch, closed):
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o1777)
        folder = Path(name) / "locks"
        monkeypatch.setattr(gpu_locks, "FOLDER", folder)
        with locked([ONE], this_process()):
            pass
        path = folder if closed == "folder" else folder / f"{ONE}.lock"
        path.chmod(0o600)
        os.chown(path, 4321, 4321)
        os.seteuid(4322)
        try:
            with pytest.raises(DsrunError) as caught, locked([ONE], this_process()):
                pass
        finally:
            os.seteuid(0)
        (problem,) = caught.value.problems
        assert "user 4321's own" in problem.what
        assert "user 4321 or root can remove it" in problem.hint and gpu_locks.VARIABLE in problem.hint


def test_a_link_in_place_of_a_file(folder, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("a thesis")
    with locked([TWO], this_process()):
        pass
    (folder / f"{ONE}.lock").symlink_to(victim)
    assert "no plain file" in refused(folder / f"{ONE}.lock")
    assert victim.read_text() == "a thesis"


def test_a_second_name_of_somebodys_file(folder, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("a thesis")
    with locked([TWO], this_process()):
        pass
    (folder / f"{ONE}.lock").hardlink_to(victim)
    assert "other names" in refused(folder / f"{ONE}.lock")
    assert victim.read_text() == "a thesis"


def test_other_things_in_place_of_a_file(folder):
    with locked([TWO], this_process()):
        pass
    path = folder / f"{ONE}.lock"
    os.mkfifo(path)
    assert refused(path)
    path.unlink()
    path.mkdir()
    assert refused(path)


def test_a_folder_that_can_not_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path / "none" / "locks")
    assert "No such file" in refused(tmp_path / "none" / "locks")


@pytest.mark.skipif(os.getuid() != 0, reason="becomes other users")
def test_several_users(monkeypatch, unseen):
    """Whoever comes first makes folder and file; the others can use them, and can't remove them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o1777)
        monkeypatch.setattr(gpu_locks, "FOLDER", Path(name) / "locks")

        def as_user(uid: int, held: bool) -> None:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.setgid(uid)
                    os.setuid(uid)
                    os.umask(0o077)
                    assert (holder_of(ONE) is not None) == held
                    try:
                        with locked([ONE], this_process()):
                            assert not held
                            assert holder_of(ONE).user == f"user {uid}"
                    except BusyError as error:
                        assert held
                        assert "user 4323's dsrun" in str(error)
                    if uid != 4321:
                        with pytest.raises(PermissionError):
                            (gpu_locks.FOLDER / f"{ONE}.lock").unlink()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

        as_user(4321, held=False)
        as_user(4322, held=False)
        with locked([ONE], LockHolder("user 4323", 9)):
            as_user(4322, held=True)
        as_user(4322, held=False)
        assert gpu_locks.FOLDER.stat().st_uid == 4321
