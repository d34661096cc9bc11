"""Why a job died, in words."""

from __future__ import annotations

import time

import pytest

from dsrun.jobs import diagnosis
from dsrun.jobs.diagnosis import NodeEnd, RankEnd
from dsrun.jobs.job import HostDevices

HOSTS = (HostDevices("n1", (0, 1)), HostDevices("n2", (0, 1, 2)))


def failed(rank: int, when: float, error: str) -> RankEnd:
    return RankEnd(rank, when, error, killed=False)


def killed(rank: int, when: float) -> RankEnd:
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
        (-99, 0, ["killed"]),
        (None, 0, ["killed"]),
        (None, 2, ["OOM"]),
        (3, 0, ["exit code 3"]),
        (0, 0, ["exit code 0", "without a word"]),
    ],
)
def test_codes_in_words(code, ooms, words):
    assert all(word in diagnosis.killed_in_words(code, ooms) for word in words)


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
    assert diagnosis.reported_code(said, code, alone) == found


def test_oom_kills_are_a_number(tmp_path):
    assert diagnosis.oom_kills() >= 0
    assert diagnosis.oom_kills(tmp_path) >= 0


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "rank-0.log"
    assert "empty" in diagnosis.tail(log)
    log.write_bytes(b"\n\n")
    assert "empty" in diagnosis.tail(log)
    log.write_bytes(b"".join(b"line %d\n\n" % number for number in range(50)) + b"\xff broken " + b"x" * 999)
    lines = diagnosis.tail(log, 3).splitlines()
    assert [line.split("|")[1].strip()[:8] for line in lines[:2]] == ["line 48", "line 49"]
    assert len(lines) == 3
    assert all(len(line) < 260 for line in lines)


def test_a_log_of_gigabytes_is_not_read_whole(tmp_path):
    log = tmp_path / "rank-0.log"
    with log.open("wb") as file:
        file.truncate(8 << 30)  # takes no room
        file.seek(0, 2)
        file.write(b"\nthe last line\n")
    began = time.monotonic()
    assert "the last line" in diagnosis.tail(log, 1)
    assert time.monotonic() - began < 1


def test_a_bar_is_its_last_state(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"\r".join(b"%d%%|# |" % n for n in range(50)) + b"\nall: 100%|##|\nthen\n")
    assert diagnosis.tail(log).splitlines() == ["    | 49%|# |", "    | then"]


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([failed(1, 5, "ValueError: a"), failed(0, 3, "ValueError: b")], 0),
        ([failed(0, 1, "RuntimeError: Connection reset by peer"), failed(1, 2, "ValueError: bad row")], 1),
        ([failed(0, 1, "NCCL error"), killed(1, 2)], 1),
        (
            [
                failed(0, 1, "the launcher or dsrun is gone; this rank ends too"),
                failed(1, 2, "KeyError: 'x'"),
            ],
            1,
        ),
        ([failed(0, 2, "Broken pipe"), failed(1, 1, "timed out")], 1),
    ],
)
def test_the_first_that_did_not_only_lose_its_peers(ends, first):
    assert diagnosis.first_of(ends).rank == first


def test_none_ended():
    assert diagnosis.first_of([]) is None


def test_the_host_of_a_rank_is_named(make_job, tmp_path):
    job = make_job(tmp_path, hosts=HOSTS)
    assert [diagnosis.node_of(job, rank) for rank in range(5)] == [0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="no rank 5"):
        diagnosis.node_of(job, 5)
    nodes = [NodeEnd(0, 1, "exits with return code = -15"), NodeEnd(1, 245, "exits with return code = -11")]
    problem, code = diagnosis.diagnose(job, [killed(3, 1), failed(0, 2, "Connection closed by peer")], nodes)
    assert problem.what.startswith("rank 3 on n2 died first: killed by SIGSEGV")
    assert code == -11


def test_the_kernels_evidence_is_of_the_ranks_own_host(make_job, tmp_path):
    job = make_job(tmp_path, hosts=HOSTS)
    starved = {"least_ram_bytes": 2**28, "ram_bytes": 64 * 2**30}
    nodes = [
        NodeEnd(0, 1, "exits with return code = 1", ooms=3),
        NodeEnd(1, 247, "exits with return code = -9", **starved),
    ]
    problem, code = diagnosis.diagnose(job, [killed(2, 1)], nodes)
    assert "OOM killer:" not in problem.what
    assert "the least host memory left while it ran was 0.2 of 64.0 GiB" in problem.what
    assert code == -9
    nodes = [NodeEnd(1, 0, "", ooms=1, **starved)]
    problem, code = diagnosis.diagnose(job, [killed(2, 1)], nodes)
    assert "killed by the kernel's OOM killer" in problem.what
    assert code == -9


def test_a_host_that_said_nothing_more(make_job, tmp_path):
    problem, code = diagnosis.diagnose(make_job(tmp_path, hosts=HOSTS), [failed(4, 1, "KeyError: 'x'")], [])
    assert "rank 4 on n2 failed first: KeyError: 'x'" in problem.what
    assert code == 1


@pytest.mark.parametrize(("code", "wanted"), [(-15, 7), (7, 7), (1, 7), (None, 7)])
def test_the_ranks_code_where_the_launcher_was_ended_before_it_had(make_job, tmp_path, code, wanted):
    """DeepSpeed's launcher takes seconds to leave after its last word."""
    node = NodeEnd(0, code, "['python'] exits with return code = 7")
    problem, found = diagnosis.diagnose(make_job(tmp_path), [failed(1, 1, "SystemExit")], [node])
    assert found == wanted
    assert diagnosis.diagnose(make_job(tmp_path), [failed(1, 1, "x")], [NodeEnd(0, -15)])[1] == 1
    problem, found = diagnosis.diagnose(make_job(tmp_path), [killed(1, 1)], [NodeEnd(0, -15)])
    assert "SIGTERM" not in problem.what
    assert found == 1


def test_no_rank_failed_by_itself(make_job, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "launcher-1.log").write_text("No module named deepspeed\n")
    nodes = [NodeEnd(0, 0), NodeEnd(1, 2)]
    problem, code = diagnosis.diagnose(make_job(tmp_path, hosts=HOSTS), [], nodes)
    assert "the launcher on n2 ended with exit code 2" in problem.what
    assert "No module named deepspeed" in problem.what
    assert "launcher-1.log" in problem.hint
    assert code == 2
    assert diagnosis.diagnose(make_job(tmp_path), [], [])[1] == 1
