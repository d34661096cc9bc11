"""What stands before a line's text, taken off and kept."""

from __future__ import annotations

import pytest

from dsrun.jobs.diagnosis.reading.log_lines import (
    MOST_CHARACTERS,
    folded,
    narrow,
    narrow_bytes,
    peeled,
    pieces,
)


@pytest.mark.parametrize(
    ("raw", "text", "rank", "host", "level"),
    [
        ("[rank3]: ValueError: x", "ValueError: x", 3, None, ""),
        ("[default5]:ValueError: x", "ValueError: x", 5, None, ""),
        ("node2: [rank3]: 2024-09-15 20:18:01 [INFO] hello", "hello", 3, "node2", "INFO"),
        ("10.0.0.5: hello", "hello", None, "10.0.0.5", ""),
        ("worker-0:946:988 [0] NCCL WARN x", "NCCL WARN x", None, "worker-0", ""),
        ("(RewardActor pid=77, ip=10.1.2.3) hello", "hello", None, "10.1.2.3", ""),
        ("(pid=41715) hello", "hello", None, None, ""),
        ("12: hello", "hello", 12, None, ""),
        (" 3: hello", "hello", 3, None, ""),
        ("  3:   File", "  File", 3, None, ""),
        ("   3: core::panicking", "   3: core::panicking", None, None, ""),
        ("[1,7]<stderr>: hello", "hello", 7, None, ""),
        ("stderr: hello", "hello", None, None, ""),
        ("【2023-07-09 22:14:41】hello", "hello", None, None, ""),
        ("> hello", "hello", None, None, ""),
        ("\x1b[31mhello\x1b[0m", "hello", None, None, ""),
        ("[pod/train-worker-1/pytorch] hello", "hello", None, "train-worker-1", ""),
        ("trainer-1  | hello", "hello", None, "trainer-1", ""),
        ("2024-09-15T20:18:01.123456789Z hello", "hello", None, None, ""),
        ("RuntimeError: CUDA error 2: x", "RuntimeError: CUDA error 2: x", None, None, ""),
        ("step 5: loss 2", "step 5: loss 2", None, None, ""),
        ("    indented", "    indented", None, None, ""),
        ("he\x00llo", "hello", None, None, ""),
    ],
)
def test_prefixes(raw, text, rank, host, level):
    line = peeled(0, 1, raw)
    assert (line.text, line.rank, line.host, line.level) == (text, rank, host, level)


def test_a_rank_begins_behind_anothers_unfinished_line():
    assert pieces("step 3/9 [rank1]: ValueError: x") == ["step 3/9 ", "[rank1]: ValueError: x"]
    for one in ("node2: [rank3]: hello", "[default1]:[rank1]: hello", "[rank1]: hello"):
        assert pieces(one) == [one]


def test_times_are_compared():
    first = peeled(0, 1, "[2024-09-15 20:18:01,500] a").when
    assert peeled(0, 1, "2024-09-15T20:18:02Z a").when - first == 0.5
    glog = [
        peeled(0, 1, f"[rank0]:[E{day} 01:50:3{second}.889 a.cpp:1] a").when
        for day, second in (("410", 1), ("0410", 3))
    ]
    assert glog[1] - glog[0] == 2
    assert peeled(0, 1, "2024-99-15 20:18:01 a").when is None


def test_the_logs_own_rank_and_host_hold_where_the_line_names_none():
    assert peeled(0, 1, "a", rank=4, host="n1")[4:6] == (4, "n1")
    assert peeled(0, 1, "[rank1]: a", rank=4).rank == 1


def test_a_line_of_megabytes_is_its_two_ends():
    line = peeled(0, 1, "begin" + "x" * 3_000_000 + "end")
    assert len(line.whole) < MOST_CHARACTERS + 10
    assert line.whole.startswith("begin") and line.whole.endswith("end")


def test_a_folded_text_has_small_letters_and_no_digits():
    assert folded("[rank0] CUDA Error 28, 内存\n".encode()) == "[rank] cuda error , 内存\n".encode()


def test_bytes_are_narrowed_as_texts_are():
    text = "ValueError：1\nOSError : 2\n"
    assert narrow_bytes(text.encode()) == narrow(text).encode() == b"ValueError: 1\nOSError: 2\n"
