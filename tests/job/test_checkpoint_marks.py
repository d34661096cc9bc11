"""Checkpoints as they lie on the disk: marks, sizes and digests, and which one is gone on from. Without torch."""

from __future__ import annotations

import errno
import json
import os
import zlib
from pathlib import Path

import pytest

from dsrun.errors import DsrunError
from dsrun.job import checkpoints
from dsrun.job.checkpoints import CheckpointChoice, Mark, WrittenFile
from dsrun.job.layout import DOUBTFUL, MARK, whole_checkpoints
from dsrun.jobs.assembly.resume import checkpoint_choice, checkpoint_of
from dsrun.options.table import RestoreOptions

CONTENT = {"mp_rank_00_model_states.pt": b"weights", "swap/rank1/a b 实验.swp": b"states"}


@pytest.fixture
def make(tmp_path):
    """`make(step)`: a whole checkpoint after that step."""

    def made(step: int) -> Path:
        folder = tmp_path / f"checkpoints/step-{step}"
        files = {}
        for rank, (name, content) in enumerate(CONTENT.items()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content + bytes([step]))
            files[name] = WrittenFile.of(folder / name, rank)
        (folder / MARK).write_text(Mark(step, {"world_size": 2}, files).text())
        return folder

    return made


def digests(folder: Path) -> str:
    mark = checkpoints.read_mark(folder)
    return checkpoints.damage_by_digests(folder, mark, mark.files)


def test_a_mark(make):
    folder = make(4)
    mark = checkpoints.read_mark(folder)
    assert (mark.step, mark.layout) == (4, {"world_size": 2})
    second = mark.files["swap/rank1/a b 实验.swp"]
    assert second == WrittenFile(7, f"{zlib.crc32(b'states' + bytes([4])):08x}", 1)
    assert json.loads((folder / MARK).read_text())["files"]["mp_rank_00_model_states.pt"]["rank"] == 0
    assert checkpoints.damage(folder) == digests(folder) == ""


def test_a_large_file_is_read_in_blocks(tmp_path):
    content = os.urandom(3 * checkpoints.BLOCK_BYTES + 17)
    (tmp_path / "a").write_bytes(content)
    assert WrittenFile.of(tmp_path / "a", 5) == WrittenFile(len(content), f"{zlib.crc32(content):08x}", 5)


@pytest.mark.parametrize("text", ["{}", '{"step": 4, "layout": {"world_size": 2}}\n'])
def test_a_mark_of_before_there_were_digests(make, text):
    folder = make(4)
    (folder / MARK).write_text(text)
    assert checkpoints.damage(folder) == ""
    assert checkpoints.read_mark(folder).step == 4
    assert not checkpoints.read_mark(folder).files


def test_each_change_of_a_mark_is_seen(make):
    folder = make(4)
    content = (folder / MARK).read_bytes()
    for place in range(len(content) - 1):
        (folder / MARK).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert "its mark `complete`" in checkpoints.damage(folder), place
    for end in range(len(content) - 1):
        (folder / MARK).write_bytes(content[:end])
        assert "its mark `complete`" in checkpoints.damage(folder), end


def test_the_mark_of_another_step(make):
    one, other = make(4), make(6)
    (one / MARK).write_text((other / MARK).read_text())
    assert "is of the checkpoint after step 6" in checkpoints.damage(one)


@pytest.mark.parametrize("name", CONTENT)
def test_sizes_and_names(make, name):
    folder = make(4)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    assert f"is damaged: {name} (of rank" in checkpoints.damage(folder)
    (folder / name).unlink()
    assert f"{name} (of rank {list(CONTENT).index(name)}) is missing" in checkpoints.damage(folder)
    (folder / name).write_bytes(content)
    (folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt").write_bytes(b"of other ranks")
    assert "zero_pp_rank_2_mp_rank_00_optim_states.pt was not written with it" in checkpoints.damage(folder)


@pytest.mark.parametrize("name", CONTENT)
def test_digests(make, name):
    folder = make(4)
    content = bytearray((folder / name).read_bytes())
    content[2] ^= 4
    (folder / name).write_bytes(bytes(content))
    assert checkpoints.damage(folder) == ""
    assert f"the digest of {name} (of rank {list(CONTENT).index(name)})" in digests(folder)


def test_what_can_not_be_read(make, monkeypatch):
    """A disk's fault is damage; what may be over in a minute is not."""
    folder = make(4)
    for number, damaged in (
        (errno.EIO, True),
        (errno.ENOENT, True),
        (errno.EACCES, False),
        (errno.ESTALE, False),
    ):

        def refuse(*_, number=number):
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patched:
            patched.setattr(checkpoints, "_digest", refuse)
            if damaged:
                assert "is damaged" in digests(folder)
            else:
                with pytest.raises(OSError, match=os.strerror(number)):
                    digests(folder)


def test_which_one_is_gone_on_from(make, tmp_path):
    assert checkpoints.newest_whole(tmp_path) == (None, [])
    older, newest = make(9), make(10)
    assert checkpoints.newest_whole(tmp_path) == (newest, [])
    (newest / "mp_rank_00_model_states.pt").unlink()
    folder, damaged = checkpoints.newest_whole(tmp_path)
    assert folder == older
    assert damaged == ["step-10 is damaged: mp_rank_00_model_states.pt (of rank 0) is missing"]
    found, (note,) = checkpoint_of(tmp_path, CheckpointChoice())
    assert found == older and note.endswith("; going on from step-9")
    (older / MARK).write_text("")
    with pytest.raises(DsrunError, match="none of its checkpoints can be read") as caught:
        checkpoints.newest_whole(tmp_path)
    assert "step-9 is damaged" in str(caught.value) and "dsrun rerun" in str(caught.value)
    for folder in (older, newest):
        checkpoints.put_aside(folder, checkpoints.damage(folder))
    with pytest.raises(DsrunError, match="none of its checkpoints can be read"):
        checkpoints.newest_whole(tmp_path)


def test_one_that_is_named(make, tmp_path):
    older, newest = make(2), make(10)
    assert checkpoint_of(tmp_path, CheckpointChoice(2)) == (older, [])
    with pytest.raises(DsrunError, match="no whole checkpoint after step 3") as caught:
        checkpoints.named_checkpoint(tmp_path, 3)
    assert "There are: 2, 10." in str(caught.value)
    (newest / MARK).write_text("")
    with pytest.raises(DsrunError, match="is damaged") as caught:
        checkpoints.named_checkpoint(tmp_path, 10)
    assert "Take another: --checkpoint N (there are: 2)." in str(caught.value)


def test_how_each_stands(make, tmp_path):
    for step in (2, 4, 6, 8, 12):
        make(step)
    folder = tmp_path / "checkpoints"
    (folder / "step-4" / "mp_rank_00_model_states.pt").write_bytes(b"")
    (folder / "step-6" / MARK).rename(folder / "step-6" / DOUBTFUL)
    checkpoints.put_aside(folder / "step-8", "put aside: the run went on from step-2")
    (folder / "step-12" / MARK).unlink()
    found = {one.folder.name: one for one in checkpoints.states(tmp_path)}
    assert list(found) == ["step-2", "step-4", "step-6", "step-8", "step-12"]
    assert [one.state.partition(":")[0] for one in found.values()] == [
        "whole", "is damaged", "doubtful", "put aside", "incomplete",
    ]  # fmt: skip
    assert [name for name, one in found.items() if one.damaged] == ["step-4"]
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step-2", "step-4"]


def test_the_choice_for_the_ranks(tmp_path):
    assert checkpoints.choice_of(tmp_path) == CheckpointChoice()
    wanted = CheckpointChoice(6, digests=False)
    checkpoints.put_choice(tmp_path, wanted)
    assert checkpoints.choice_of(tmp_path) == wanted
    (tmp_path / checkpoints.CHOICE).write_text('{"steps": 3}')
    with pytest.raises(DsrunError, match="is not what dsrun writes"):
        checkpoints.choice_of(tmp_path)


def test_what_slurm_starts_again_goes_on_from_what_it_wrote(tmp_path):
    """The command still names the step that the first start went back to."""
    options = RestoreOptions(checkpoint=6)
    assert checkpoint_choice(options, tmp_path, {}) == CheckpointChoice(6)
    assert checkpoint_choice(options, tmp_path, {"SLURM_RESTART_COUNT": "0"}) == CheckpointChoice(6)
    again = {"SLURM_RESTART_COUNT": "1"}
    assert checkpoint_choice(options, tmp_path, again) == CheckpointChoice()
    checkpoints.put_choice(tmp_path, CheckpointChoice(6))
    assert checkpoint_choice(options, tmp_path, again) == CheckpointChoice(6), "the ranks never came to it"
