"""The digest of a file that torch has written is that of all its bytes, and its tensors are not read for it."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path

import pytest
from needed import needs

needs("torch")

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dsrun.job.checkpoints import BLOCK_BYTES, WrittenFile
from dsrun.training import checkpoint, zip_digests
from dsrun.training.zip_digests import joined, written

LARGE, SMALL = BLOCK_BYTES // 4 + 1000, 100
"""Counts of fp32 numbers: more than a block, and less."""


def archive(*counts: int) -> bytes:
    """A file of torch.save's with so many numbers in each of its records."""
    file = io.BytesIO()
    torch.save([torch.rand(count) for count in counts], file)
    return file.getvalue()


@pytest.fixture
def bytes_read(monkeypatch):
    """How much of a file was read to make digests."""
    count = [0]
    read, whole = zip_digests._read, WrittenFile.of

    def reading(file, position, end, digest):
        count[0] += end - position
        return read(file, position, end, digest)

    def reading_all(path, rank):
        count[0] += path.stat().st_size
        return whole(path, rank)

    monkeypatch.setattr(zip_digests, "_read", reading)
    monkeypatch.setattr(WrittenFile, "of", reading_all)
    return count


def check(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert written(path, 3) == WrittenFile(len(content), f"{zlib.crc32(content):08x}", 3)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_digests_become_one(first, second):
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize(
    "counts",
    [[LARGE], [SMALL, LARGE], [LARGE, SMALL, 2 * LARGE], [LARGE] * 3],
    ids=["one", "a small one first", "between", "many"],
)
def test_tensors_are_not_read(tmp_path, bytes_read, counts):
    content = archive(*counts)
    check(tmp_path / "a.pt", content)
    assert bytes_read[0] == len(content) - 4 * sum(count for count in counts if count >= LARGE)
    assert bytes_read[0] < 10_000


def test_a_checkpoint_takes_them(tmp_path, bytes_read):
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    path.write_bytes(archive(LARGE))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        made = checkpoint._reach_disk_with_digests(tmp_path, [path])
    finally:
        dist.destroy_process_group()
    assert made == {path.name: written(path, 0)}
    assert bytes_read[0] < 10_000


def test_one_archive_after_the_other(tmp_path, bytes_read):
    """As FSDP's files are."""
    content = b"".join(archive(count) for count in (SMALL, LARGE, SMALL, SMALL, 3 * LARGE))
    check(tmp_path / "__0_0.distcp", content)
    assert bytes_read[0] == len(content) - 4 * 4 * LARGE


def test_more_after_an_archive(tmp_path):
    check(tmp_path / "a.pt", archive(LARGE) + b"more")


def compressed() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("a", bytes(3 * BLOCK_BYTES))
        made.writestr("b", os.urandom(2 * BLOCK_BYTES))
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        os.urandom(2 * BLOCK_BYTES), b"before" + archive(LARGE), archive(LARGE)[:-30],
        bytes(2 * BLOCK_BYTES) + archive(SMALL), compressed(), archive(LARGE) + b"PK\x05\x06" + bytes(18),
    ],
    ids=["no archive", "more before", "cut off", "zeros before", "compressed", "an empty one after"],
)  # fmt: skip
def test_what_is_no_file_of_torchs_is_read(tmp_path, bytes_read, content):
    check(tmp_path / "a.swp", content)
    assert bytes_read[0] >= len(content)


def test_archives_without_digests(tmp_path, bytes_read):
    torch.serialization.set_crc32_options(False)
    try:
        content = archive(LARGE)
        check(tmp_path / "a.pt", content)
    finally:
        torch.serialization.set_crc32_options(True)
    assert bytes_read[0] == len(content)


def test_what_changed_after_torch_wrote_it_is_seen(tmp_path):
    """The digest is of what lay in memory: a disk that keeps something else is found out."""
    content = bytearray(archive(LARGE))
    content[len(content) // 2] ^= 1
    (tmp_path / "a.pt").write_bytes(content)
    assert written(tmp_path / "a.pt", 0) != WrittenFile.of(tmp_path / "a.pt", 0)
