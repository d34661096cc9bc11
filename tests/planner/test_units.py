"""Sizes and counts as people write them: 32GiB is not 32GB, and 32 is neither."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from running import examples

from dsrun.errors import DsrunError
from dsrun.planner.units import count, significant, size

SIZES = {
    "32GiB": 32 * 2**30,
    "32 GiB": 32 * 2**30,
    " 32gib\t": 32 * 2**30,
    "256 GB": 256e9,
    "1.8TB": 1.8e12,
    "2TiB": 2**41,
    "512MiB": 2**29,
    "512MB": 512e6,
    "1e3KiB": 1000 * 2**10,
    "100KB": 100e3,
    "1_024MiB": 2**30,
    "1.GiB": 2**30,
    "4096B": 4096,
}
COUNTS = {
    "6.2e9": 6.2e9,
    "6.2B": 6.2e9,
    "6.2b": 6.2e9,
    "6.2 B": 6.2e9,
    "350M": 350e6,
    "32k": 32e3,
    "1T": 1e12,
    "6_243_584_000": 6_243_584_000,
    "6243584000": 6_243_584_000,
    "1e+3": 1000,
    "5e-1B": 0.5e9,
    "7": 7,
}
NONSENSE = (
    "",
    " ",
    "GiB",
    "much",
    "-1",
    "-32GiB",
    "+32GiB",
    "1,5GiB",
    "0x20GiB",
    "nan",
    "inf",
    "infGiB",
    "3 2GiB",
)
NONSENSE += ("1__0GiB", "_1GiB", "1e5.GiB", "32GiB!", "32Gb/s", "٣٢GiB", "32GiB 32GiB")


def problem(read, text):
    with pytest.raises(DsrunError) as raised:
        read(text, "--gpu-memory")
    (only,) = raised.value.problems
    assert only.where == "--gpu-memory"
    assert only.hint
    return only


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text):
    assert size(text, "") == SIZES[text]


def test_gb_is_not_gib():
    assert size("24 GB", "") == 24e9
    assert size("24GiB", "") == 24 * 1024**3
    assert size("1000GB", "") == size("1TB", "")
    assert size("1024GiB", "") == size("1TiB", "")


@pytest.mark.parametrize("text", ["32", "32G", "32g", " 32 G ", "32."])
def test_without_a_unit_both_readings_are_named(text):
    said = problem(size, text)
    number = text.strip(" Gg")
    assert f"{number}GiB (powers of 2" in said.hint
    assert f"{number}GB (powers of 10)" in said.hint
    assert (f"{number}TB" in said.hint) == (text[-1] not in "gG ")
    assert repr(text) in said.what


@pytest.mark.parametrize("letter", ["K", "M", "T", "t"])
def test_half_a_unit(letter):
    said = problem(size, f"7{letter}")
    assert f"7{letter.upper()}iB (powers of 2" in said.hint
    assert f"7{letter.upper()}B (powers of 10)" in said.hint


@pytest.mark.parametrize("text", ["32PB", "32bit", "32 GiBs", "32Gigabytes"])
def test_unknown_units(text):
    unit = text.removeprefix("32").strip()
    assert repr(unit) in problem(size, text).what


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense(text):
    assert problem(size, text).what == f"{text!r} is not a size"
    assert problem(count, text).what == f"{text!r} is not a number"


@pytest.mark.parametrize("text", ["0GiB", "0.0TB", "1e999GiB", "1e-999GiB", f"{'9' * 400}B"])
def test_invalid_sizes(text):
    assert problem(size, text).what == f"can't be {text}"


@pytest.mark.parametrize("text", COUNTS)
def test_counts(text):
    assert count(text, "") == COUNTS[text]


@pytest.mark.parametrize("text", ["0", "0e9", "0B", "1e999", "1e300T", "1e-999", "9" * 400])
def test_invalid_counts(text):
    assert problem(count, text).what == f"can't be {text}"


@pytest.mark.parametrize("text", ["6.2GiB", "6.2G", "6.2BB", "6.2 billion", "1e9 parameters", "7 B x"])
def test_other_units_are_no_counts(text):
    assert repr(text) in problem(count, text).what


def said_or_above_0(read, text):
    try:
        found = read(text, "x")
    except DsrunError as error:
        assert error.problems[0].where == "x"
        return
    assert 0 < found < math.inf


@settings(deadline=None)
@given(st.text())
def test_any_text(text):
    said_or_above_0(size, text)
    said_or_above_0(count, text)


@settings(deadline=None, max_examples=examples(500))
@given(st.text("0123456789._eE+-KMGTBib ", max_size=12))
@example("1.2.3")
@example("1.2.3GiB")
def test_any_text_that_looks_like_a_number(text):
    said_or_above_0(size, text)
    said_or_above_0(count, text)


@settings(deadline=None)
@given(st.integers(1, 9000), st.sampled_from(["KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"]))
def test_whole_numbers_are_exact(number, unit):
    power = "KMGT".index(unit[0]) + 1
    base = 1024 if "i" in unit else 1000
    assert size(f"{number}{unit}", "") == number * base**power


def test_a_plans_numbers_have_the_digits_that_are_the_same_everywhere():
    made = significant(
        {"a": [0.1 + 0.2, {"b": 1234567890123.4567}], "c": (1, True), "d": "0.30000000000000004"}
    )
    assert made == {"a": [0.3, {"b": 1234567890120.0}], "c": [1, True], "d": "0.30000000000000004"}
    assert significant({"a": 1.4185435439185922e-84}) == {"a": 1.41854354392e-84}
