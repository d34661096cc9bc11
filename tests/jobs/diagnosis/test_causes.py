"""Why a job died, in words."""

from __future__ import annotations

import pytest

from dsrun.job import rank_state
from dsrun.job.job import HostDevices
from dsrun.jobs.diagnosis import causes, ends, killed, logs
from dsrun.jobs.diagnosis.ends import HostEnd, RankEnd

HOSTS = (HostDevices("n1", (0, 1)), HostDevices("n2", (0, 1, 2)))


def failed(rank: int, when: float, error: str) -> RankEnd:
    return RankEnd(rank, when, error, killed=False)


def was_killed(rank: int, when: float) -> RankEnd:
    return RankEnd(rank, when, "", killed=True)


@pytest.mark.parametrize(
    ("code", "ooms", "words"),
    [
        (-9, 0, ["SIGKILL", "dmesg"]),
        (-9, 1, ["OOM", "memory"]),
        (-7, 0, ["SIGBUS", "/dev/shm"]),
        (-11, 0, ["SIGSEGV"]),
        (-6, 0, ["SIGABRT"]),
        (-4, 0, ["SIGILL", "TORCH_EXTENSIONS_DIR"]),
        (-15, 0, ["SIGTERM"]),
        (-10, 0, ["SIGUSR1"]),
        (-99, 0, ["killed", "99"]),
        (None, 0, ["_exit", "dmesg"]),
        (None, 2, ["OOM"]),
        (3, 0, ["code 3"]),
        (0, 0, ["code 0"]),
    ],
)
def test_codes_in_words(code, ooms, words):
    assert all(word in killed.killed_in_words(code, ooms) for word in words)


@pytest.mark.parametrize(
    ("said", "code", "alone", "found"),
    [
        ("... exits with return code = -9", 247, True, -9),
        ("exits with return code = -9\nexits with return code = -7", 249, False, -7),
        ("exits with return code = 3", 3, True, 3),
        ("exits with return code = 3", 3, False, None),
        ("", 247, True, -9),
        ("", 1, False, None),
        ("", 0, True, None),
        ("", -15, True, None),
    ],
)
def test_the_launchers_code(said, code, alone, found):
    assert killed.reported_code(said, code, alone) == found


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "rank-0.log"
    assert "empty" in logs.tail(log)
    log.write_bytes(b"\n\n")
    assert "empty" in logs.tail(log)
    log.write_bytes(b"".join(b"line %d\n\n" % number for number in range(50)) + b"\xff broken " + b"x" * 999)
    lines = logs.tail(log, 3).splitlines()
    assert [line.split("|")[1].strip()[:8] for line in lines[:2]] == ["line 48", "line 49"]
    assert len(lines) == 3
    assert all(len(line) < 260 for line in lines)


def test_a_log_of_gigabytes_is_not_read_whole(tmp_path):
    log = tmp_path / "rank-0.log"
    with log.open("wb") as file:
        file.truncate(8 << 30)  # takes no room
        file.seek(0, 2)
        file.write(b"\nthe last line\n")
    assert len(logs.end_of(log)) == logs.TAIL_BYTES
    assert "the last line" in logs.tail(log, 1)


def test_a_bar_is_its_last_state(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"\r".join(b"%d%%|# |" % n for n in range(50)) + b"\nall: 100%|##|\nthen\n")
    assert logs.tail(log).splitlines() == ["    | 49%|# |", "    | then"]


def test_frames_of_what_starts_a_rank_are_left_out(tmp_path):
    log = tmp_path / "rank-1.log"
    log.write_text(
        "step 1\n[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "<frozen runpy>", line 88, in _run_code\n'
        '[rank1]:   File "/x/dsrun/jobs/supervision/rank.py", line 53, in main\n[rank1]:     run_script(job)\n'
        '[rank1]:     ^^^^\n[rank1]:   File "/home/me/train.py", line 4, in <module>\n[rank1]:     {}["x"]\n'
        "[rank1]: KeyError: 'x'\n"
    )
    said = logs.tail(log)
    assert "rank.py" not in said and "run_script" not in said and "^^^^" not in said
    assert all(text in said for text in ("step 1", "train.py", '{}["x"]', "KeyError"))


GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp"
LOST = f"{GLOO}/pair.cc:537] Read error [127.0.0.1]:33421: Connection reset by peer. This is typically caused by a hang"
WAITED = f"{GLOO}/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete"
HUB = "HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out. (read timeout=10)"


@pytest.mark.parametrize(
    "error",
    [
        LOST,
        WAITED,
        f"{GLOO}/pair.cc:534] Connection closed by peer [127.0.0.1]:3456",
        f"{GLOO}/pair.cc:370] writev [127.0.0.1]:3456: Broken pipe",
        "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for rank 0.\n"
        " Original exception: \n[unbound_buffer.cc:129] Timed out waiting 3000ms for send operation to complete",
        "RuntimeError: NCCL communicator was aborted on rank 1.",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited",
        "torch.distributed.DistStoreError: wait timeout after 1000ms, keys: /x",
        "torch.distributed.DistNetworkError: The client socket has timed out after 1000ms while trying to connect",
        rank_state.GONE,
    ],
)
def test_what_a_rank_says_that_lost_others(error):
    assert ends.lost_others(error)


@pytest.mark.parametrize(
    "error",
    [
        "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
        "KeyError: 'peer'",
        "KeyError",
        "FileNotFoundError: [Errno 2] No such file or directory: '/datastore/restore/train.jsonl'",
        "RuntimeError: can't restore the weights from /datastore/gloo/nccl",
        "RuntimeError: Connection refused: the feature store did not answer in time, timed out",
        "RuntimeError: Distributed package doesn't have NCCL built in",
        f"requests.exceptions.ReadTimeout: {HUB}",
        f"urllib3.exceptions.ReadTimeoutError: {HUB}",
        "httpx.ReadTimeout: The read operation timed out",
        "TimeoutError: The read operation timed out",
        "requests.exceptions.ConnectionError: (ConnectionResetError(104, 'Connection reset by peer'))",
        "ValueError: NCCL error in the user's text: connection closed by peer",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "torch.distributed.DistNetworkError: The server socket has failed to listen: port: 29500, EADDRINUSE",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, invalid usage\nncclInvalidUsage: Duplicate GPU",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1\nLast error: Cuda failure 2 'out of memory'",
        "it left with exit code 3, without an error",
        "",
    ],
)  # fmt: skip
def test_what_is_a_cause_of_its_own(error):
    assert not ends.lost_others(error)


@pytest.mark.parametrize(
    ("ended", "first"),
    [
        ([failed(1, 5, "ValueError: a"), failed(0, 3, "ValueError: b")], 0),
        ([failed(0, 1, LOST), failed(1, 2, "TypeError: no operand type")], 1),
        ([failed(0, 1, WAITED), failed(1, 2, f"requests.exceptions.ReadTimeout: {HUB}")], 1),
        ([failed(0, 1, rank_state.GONE), failed(1, 2, "KeyError: 'x'")], 1),
        ([failed(0, 2, LOST), failed(1, 1, WAITED)], 1),
        ([failed(0, 2, LOST), was_killed(1, 1)], 1),
        ([was_killed(0, 2), failed(1, 1, WAITED)], 1),
        ([was_killed(0, 2), failed(1, 1, LOST), was_killed(2, 3)], 1),
        ([failed(0, 1, LOST), failed(2, 1.5, LOST), was_killed(1, 2)], 1),
        ([failed(0, 1, LOST), was_killed(1, 2), failed(2, 3, "KeyError: 'x'")], 2),
        ([failed(0, 1, LOST), failed(2, 1.5, WAITED), was_killed(1, 2)], 0),
        ([was_killed(0, 1), was_killed(1, 2)], 0),
        ([was_killed(0, 3), failed(1, 1, WAITED), failed(2, 4, "KeyError: 'x'")], 2),
    ],
)
def test_the_first_that_did_not_only_lose_its_peers(ended, first):
    assert ends.first_of(ended).rank == first


def test_a_rank_that_the_launcher_killed_after_a_failure_is_no_cause():
    assert ends.causes([was_killed(0, 2), failed(1, 1, WAITED)]) == []
    assert ends.causes([was_killed(0, 2), failed(1, 1, WAITED)], [0]) == [was_killed(0, 2)]


@pytest.mark.parametrize(
    ("host", "name", "rank", "code"),
    [
        (HostEnd(0, 1, "exits with return code = 1"), "rank-failed", 1, 1),
        (HostEnd(0, 1, "exits with return code = 1", ooms=1), "rank-killed", 0, -9),
        (HostEnd(0, 245, "exits with return code = -11"), "rank-killed", 0, -11),
        (HostEnd(0, 241, "exits with return code = -15"), "rank-failed", 1, 1),
    ],
)
def test_a_rank_that_waited_and_one_that_was_killed_after_it(make_job, tmp_path, host, name, rank, code):
    found = causes.diagnose(make_job(tmp_path), [was_killed(0, 2), failed(1, 1, WAITED)], [host])
    assert (found.name, found.rank, found.exit_code) == (name, rank, code)


@pytest.mark.parametrize(("pid", "words"), [(70, "code 0"), (7, "_exit")])
def test_a_rank_that_left_with_code_0_was_not_killed(make_job, tmp_path, pid, words):
    host = HostEnd(0, 1, "Process 70 exits successfully.\n['python'] exits with return code = 1")
    ended = [was_killed(0, 1)._replace(pid=pid), failed(1, 2, LOST)]
    found = causes.diagnose(make_job(tmp_path), ended, [host])
    assert (found.name, found.rank, found.exit_code) == ("rank-killed", 0, 1)
    assert words in found.problem.what.splitlines()[0]
    assert "SIGKILL" not in found.problem.what


def test_none_ended():
    assert ends.first_of([]) is None


def test_the_host_of_a_rank_is_named(make_job, tmp_path):
    job = make_job(tmp_path, hosts=HOSTS)
    assert [causes.host_number(job, rank) for rank in range(5)] == [0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="no rank 5"):
        causes.host_number(job, 5)
    hosts = [HostEnd(0, 1, "exits with return code = -15"), HostEnd(1, 245, "exits with return code = -11")]
    found = causes.diagnose(job, [was_killed(3, 1), failed(0, 2, LOST)], hosts)
    assert (found.name, found.rank, found.exit_code) == ("rank-killed", 3, -11)
    assert "n2" in found.problem.what
    assert "SIGSEGV" in found.problem.what


def test_the_kernels_evidence_is_of_the_ranks_own_host(make_job, tmp_path):
    job = make_job(tmp_path, hosts=HOSTS)
    starved = {"least_ram_bytes": 2**28, "ram_bytes": 64 * 2**30}
    hosts = [
        HostEnd(0, 1, "exits with return code = 1", ooms=3),
        HostEnd(1, 247, "exits with return code = -9", **starved),
    ]
    found = causes.diagnose(job, [was_killed(2, 1)], hosts)
    assert "OOM killer:" not in found.problem.what
    assert "0.2 of 64.0 GiB" in found.problem.what
    assert found.exit_code == -9
    found = causes.diagnose(job, [was_killed(2, 1)], [HostEnd(1, 0, "", ooms=1, **starved)])
    assert "OOM killer" in found.problem.what
    assert found.exit_code == -9


def test_a_host_that_said_nothing_more(make_job, tmp_path):
    found = causes.diagnose(make_job(tmp_path, hosts=HOSTS), [failed(4, 1, "KeyError: 'x'")], [])
    assert (found.name, found.rank, found.exit_code) == ("rank-failed", 4, 1)
    assert "KeyError: 'x'" in found.problem.what


@pytest.mark.parametrize("code", [-15, 7, 1, None])
def test_the_ranks_code_where_the_launcher_was_ended_before_it_had(make_job, tmp_path, code):
    """DeepSpeed's launcher takes seconds to leave after its last line."""
    host = HostEnd(0, code, "['python'] exits with return code = 7")
    assert causes.diagnose(make_job(tmp_path), [failed(1, 1, "SystemExit")], [host]).exit_code == 7


@pytest.mark.parametrize("code", [241, 143, -15])
def test_a_ranks_own_code_counts_and_not_that_of_one_that_was_ended_after_it(make_job, tmp_path, code):
    ended = failed(1, 1, "it left with exit code 3, without an error")
    assert causes.diagnose(make_job(tmp_path), [ended._replace(code=3)], [HostEnd(0, code)]).exit_code == 3
    assert causes.diagnose(make_job(tmp_path), [ended], [HostEnd(0, code)]).exit_code == 1
    killed = was_killed(1, 1)._replace(code=-9)
    assert causes.diagnose(make_job(tmp_path), [killed], [HostEnd(0, code)]).exit_code == -9


def test_a_launcher_that_was_ended_has_no_code_of_a_rank(make_job, tmp_path):
    for ended in (failed(1, 1, "x"), was_killed(1, 1)):
        found = causes.diagnose(make_job(tmp_path), [ended], [HostEnd(0, -15)])
        assert found.exit_code == 1
        assert "SIGTERM" not in found.problem.what


def test_a_launcher_that_was_killed(make_job, tmp_path):
    host = HostEnd(0, -9, killed_by=9)
    for ended, name in (
        ([], "launcher-killed"),
        ([failed(0, 1, LOST)], "launcher-killed"),
        ([failed(0, 1, "KeyError: 'x'")], "rank-failed"),
    ):
        assert causes.diagnose(make_job(tmp_path), ended, [host]).name == name


def test_no_rank_failed_by_itself(make_job, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "launcher-1.log").write_text("No module named deepspeed\n")
    hosts = [HostEnd(0, 0), HostEnd(1, 2)]
    found = causes.diagnose(make_job(tmp_path, hosts=HOSTS), [], hosts)
    assert (found.name, found.rank, found.exit_code) == ("launcher-failed", None, 2)
    assert "No module named deepspeed" in found.problem.what
    assert "launcher-1.log" in found.problem.hint
    assert causes.diagnose(make_job(tmp_path), [], []).exit_code == 1


def test_what_all_ranks_agree_on_is_no_ranks_own(make_job, tmp_path):
    error = "step 3: the loss is nan"
    ended = [RankEnd(rank, 2.0 - rank, error, killed=False, agreed=True) for rank in (0, 1)]
    host = HostEnd(0, 1, "exits with return code = 1")
    found = causes.diagnose(make_job(tmp_path, hosts=HOSTS), ended, [host])
    assert (found.name, found.problem.what, found.exit_code) == ("all-ranks-agreed", error, 1)
