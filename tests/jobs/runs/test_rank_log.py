"""Logs that are long: read in little memory, over their parts, from their end or from a moment on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsrun.cli import logs as logs_command
from dsrun.errors import DsrunError
from dsrun.job import log_parts
from dsrun.jobs.diagnosis import log_files, run_logs
from dsrun.jobs.diagnosis.logs import tail
from dsrun.jobs.runs import rank_log, rank_logs
from dsrun.jobs.runs.rank_log import RankLog
from dsrun.jobs.runs.rank_logs import LineSelection, MergedLogs

RANK = """
import os, sys
from pathlib import Path
from dsrun.job import log_parts
log_parts.LogKeeper._keep = lambda self: None  # its looks are taken here, where it is known when
keeper = log_parts.LogKeeper(Path(sys.argv[1]), int(sys.argv[2]))
for number in range(int(sys.argv[3])):
    print(f"line {number} " + "x" * 90, flush=True)
    os.write(2, b"")
    keeper.look()
"""


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "a user's 日志"
    folder.mkdir()
    return folder / "rank-0.log"


def printed(log: Path, kept: int, lines: int) -> None:
    """What a rank leaves that prints so many lines of some 100 bytes."""
    subprocess.run([sys.executable, "-c", RANK, str(log), str(kept), str(lines)], check=True)


def texts(reader: RankLog) -> list[str]:
    found = []
    while True:
        found += [line.text for line in reader.lines(last=True)]
        if not reader.unread:
            return found


def test_a_log_in_parts_loses_nothing_while_there_is_room(log):
    printed(log, 16 * 5000, 400)
    assert len(log_parts.pieces(log)) > 5
    assert [text.split()[1] for text in texts(RankLog(log))] == [str(number) for number in range(400)]


def test_its_beginning_and_its_end_are_kept(log):
    printed(log, 16 * 1000, 1000)
    numbers = log_parts.part_numbers(log)
    assert numbers[0] == 1 and numbers[1] > 2
    size = sum(piece.stat().st_size for piece in log_parts.pieces(log))
    assert size <= 16 * 1200
    found = texts(RankLog(log))
    assert found[0].startswith("line 0 ") and found[-1].startswith("line 999 ")
    assert [text for text in found if "--log-limit" in text] == [
        f"({numbers[1] - 2} parts of this log were removed: --log-limit)"
    ]


def test_all_of_it_in_one_piece(log):
    printed(log, 0, 300)
    assert log_parts.pieces(log) == [log]


def test_a_rank_that_is_started_again_goes_on_behind_its_parts(log):
    printed(log, 16 * 5000, 100)
    printed(log, 16 * 5000, 100)
    names = [text.split()[1] for text in texts(RankLog(log))]
    assert names == [str(number) for number in range(100)] * 2


def test_who_follows_goes_on_in_the_next_part(log):
    log.write_text("a\nhalf")
    reader = RankLog(log)
    assert [line.text for line in reader.lines()] == ["a"]
    log.rename(log_parts.part(log, 1))
    assert reader.lines() == []
    log.write_text(" and half\nb\n")
    assert texts(reader) == ["half and half", "b"]
    with log.open("a") as file:
        file.write("c\n")
    log.rename(log_parts.part(log, 2))
    log.write_text("d\n")
    assert texts(reader) == ["c", "d"]


def test_who_looks_from_the_end_sees_only_what_is_new(log):
    log_parts.part(log, 1).write_text("old\n")
    log.write_text("old, too\n")
    reader = RankLog(log, from_end=True)
    assert texts(reader) == []
    log.rename(log_parts.part(log, 2))
    log.write_text("new\n")
    assert texts(reader) == ["new"]


def test_a_line_without_end_takes_no_more_memory_than_a_block(log, monkeypatch):
    monkeypatch.setattr(rank_log, "LONGEST_BYTES", 1000)
    monkeypatch.setattr(rank_log, "BLOCK_BYTES", 100)
    log.write_bytes(b"bar \r" * 1000 + b"done\n" + b"x" * 2500)
    found = texts(RankLog(log))
    assert found[0] == "done"
    assert "".join(found[1:]) == "x" * 2500
    assert max(map(len, found)) <= 1100


def merged(*paths: Path, **given) -> list[tuple[int | None, str]]:
    return list(
        MergedLogs({rank: RankLog(path) for rank, path in enumerate(paths)}, **given).all_told(last=True)
    )


def test_a_small_window_changes_nothing_where_ranks_keep_pace(tmp_path, monkeypatch):
    one, other = tmp_path / "rank-0.log", tmp_path / "rank-1.log"
    for rank, path in enumerate((one, other)):
        path.write_text("".join(f"step {n}\nown {'ab'[rank]} {n}\n" for n in range(3000)))
    whole = merged(one, other)
    assert sum(rank is None for rank, _ in whole) == 3000
    monkeypatch.setattr(rank_log, "BLOCK_BYTES", 512)
    monkeypatch.setattr(rank_logs, "WINDOW_BYTES", 0)
    monkeypatch.setattr(rank_logs, "LEAST_WINDOW_BYTES", 8000)
    assert merged(one, other) == whole


def test_long_logs_are_read_in_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_logs, "WINDOW_BYTES", 1 << 20)
    paths = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    for path in paths:
        path.write_text("".join(f"{path.stem} {n} " + "x" * 60 + "\n" for n in range(60_000)))
    logs = MergedLogs({rank: RankLog(path) for rank, path in enumerate(paths)})
    tracemalloc.start()
    try:
        assert sum(1 for _ in logs.all_told(last=True)) == 120_000
        assert (
            tracemalloc.get_traced_memory()[1] < 12 << 20
        )  # each log is 5 MB, and its lines 60 MB of objects
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("block", [7, 64, 1 << 16])
@pytest.mark.parametrize("wanted", [0, 1, 3, 9, 10, 99])
def test_where_the_last_lines_begin(log, monkeypatch, block, wanted):
    monkeypatch.setattr(rank_log, "BLOCK_BYTES", block)
    log_parts.part(log, 1).write_text("a\nb\n\nc\n")
    log_parts.part(log, 2).write_text("d\ne\nf\ng\n")
    log.write_text("h\n\n\ni\nj")
    found = texts(RankLog(log, start=rank_log.place_of_last(log, wanted)))
    assert found[len(found) - min(wanted, 10) :] == list("abcdefghij")[10 - min(wanted, 10) :]
    if wanted <= 3 and block == 7:
        assert len(found) < 10


def test_from_a_moment_on(log):
    log.write_text("old\nnew\n")
    log_parts.times_file(log).write_text("1000 1 0\n1010 1 4\n1020 1 8\nbroken\n")
    assert log_parts.place_at(log, 999) == (0, 0)
    assert log_parts.place_at(log, 1015) == (1, 4)
    assert texts(RankLog(log, start=log_parts.place_at(log, 1015))) == ["new"]
    os.utime(log, (1016, 1016))
    assert log_parts.place_at(log, 1017) == (1, 8), "nothing since"
    log.rename(log_parts.part(log, 1))
    log.write_text("newer\n")
    assert texts(RankLog(log, start=log_parts.place_at(log, 1015))) == ["new", "newer"]
    log_parts.times_file(log).unlink()
    assert log_parts.place_at(log, 1015) is None
    with pytest.raises(DsrunError, match="not kept"):
        rank_logs._start(log, LineSelection(since=1015.0))


def test_a_rank_notes_when_its_log_had_which_size(log):
    printed(log, 0, 3)
    (line,) = log_parts.times_file(log).read_text().splitlines()
    assert line.split()[1] == "1" and int(line.split()[2]) < log.stat().st_size


def test_only_lines_with_a_pattern(log):
    log.write_text("step 1\nloss 2\nstep 3\n")
    assert texts(RankLog(log, grep=re.compile("^step"))) == ["step 1", "step 3"]


SAID = [
    "Out of memory",
    "out of memory",
    "36 \u212a, no k",
    "a\u017fk",
    "损坏",
    "50%\rdone: loss 3",
    "loss\r100%",
    "a.b",
    "axb",
    "",
]


@pytest.mark.parametrize(
    "pattern",
    [
        "out of memory",
        "(?i)OUT of",
        "(?i)k",
        "k",
        "(?i)ask",
        "loss",
        "%",
        "a.b",
        "损",
        "(?i)x|y",
        "^a",
        "z",
        "(?i)z",
    ],
)
@pytest.mark.parametrize("flags", [0, re.I, re.X])
def test_words_that_a_block_lacks_are_looked_for_at_once(tmp_path, pattern, flags):
    """What is told is the same as line by line, one line in a block or all of them."""
    wanted = re.compile(pattern, flags)
    drawn = [text.rpartition("\r")[2] for text in SAID]
    (tmp_path / "all").write_bytes("\n".join(SAID).encode())
    assert texts(RankLog(tmp_path / "all", grep=wanted)) == [
        one for one in drawn if one and wanted.search(one)
    ]
    for number, text in enumerate(SAID):
        (tmp_path / f"{number}").write_bytes(f"{text}\n".encode())
        found = texts(RankLog(tmp_path / f"{number}", grep=wanted))
        assert found == [one for one in drawn[number : number + 1] if one and wanted.search(one)], text


def test_lines_without_the_words_are_not_looked_at(tmp_path, monkeypatch):
    (tmp_path / "log").write_text("step 1\nstep 2\n" * 9000)
    looked_at = []
    monkeypatch.setattr(rank_log, "_drawn", lambda raw: looked_at.append(raw) or raw.decode())
    assert texts(RankLog(tmp_path / "log", grep=re.compile("(?i)memory"))) == []
    assert looked_at == []
    assert len(texts(RankLog(tmp_path / "log", grep=re.compile("step 1")))) == 9000


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--since", "yesterday", "is no time"),
        ("--grep", "(", "no regular expression"),
        ("--tail", "-1", "-1"),
    ],
)
def test_what_no_option_of_logs_takes(option, value, said):
    done = CliRunner().invoke(logs_command.command, ["run", option, value])
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(
    "text", ["10m", "1.5h", "2026-11-23", "2026-11-23 18:30", "2026-11-23T18:30:05", "00:00"]
)
def test_times_that_since_takes(text):
    moment = logs_command._moment(None, None, text)
    assert moment is not None and moment > 1e9


# What else reads the logs


def test_a_log_that_has_just_been_renamed_still_has_an_end(log):
    log_parts.part(log, 1).write_text("first\n")
    log_parts.part(log, 2).write_text("".join(f"{n}\n" for n in range(50)) + "ValueError: bad\n")
    log.write_text("\n")
    assert "ValueError: bad" in tail(log)
    log.unlink()
    assert "ValueError: bad" in tail(log)


def test_an_attempt_begins_where_the_log_was_even_after_it_was_renamed(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    log = logs / "rank-0.log"
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    log.write_text(oom)
    before = run_logs.log_sizes(tmp_path)
    with log.open("a") as file:
        file.write("second attempt\n")
    log.rename(log_parts.part(log, 1))
    trace = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    save()\n'
    log.write_text(f"{trace}OSError: [Errno 28] No space left on device\n")
    found = run_logs.of_run(tmp_path, rank=0, since=before)
    assert found.cause == "disk_full"
    (source,) = [one for one in run_logs._logs(tmp_path, 0, before) if one.path == log_parts.part(log, 1)]
    assert source.since == len(oom)
    assert next(one for one in run_logs._logs(tmp_path, 0, before) if one.path == log).since == 0


def test_parts_are_read_in_order(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    log = logs / "rank-0.log"
    for number in (1, 2, 10):
        log_parts.part(log, number).write_text("x\n")
    log.write_text("x\n")
    log_parts.times_file(log).write_text("1 1 0\n")
    names = [Path(one.name).name for one in run_logs._logs(tmp_path, 0, {})]
    assert names == ["rank-0.log.1", "rank-0.log.2", "rank-0.log.10", "rank-0.log"]
    given = [Path(one.name).name for one in log_files.sources([str(logs)])]
    assert given == names
    assert {one.rank for one in log_files.sources([str(logs)])} == {0}


def test_every_file_obeys_the_umask(log):
    before = os.umask(0o002)
    try:
        printed(log, 16 * 500, 40)
    finally:
        os.umask(before)
    modes = {oct(path.stat().st_mode & 0o777) for path in log.parent.iterdir()}
    assert modes == {"0o664"}
