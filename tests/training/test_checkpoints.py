"""Checkpoints: whole or not at all, whatever happens meanwhile; and divided over other ranks, element by element."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed")


from dsrun.errors import DsrunError, TrainingError
from dsrun.job.checkpoints import (
    CheckpointChoice,
    Mark,
    WrittenFile,
    newest_whole,
    put_choice,
    read_mark,
    states,
)
from dsrun.job.layout import CHECKPOINTS, DOUBTFUL, MARK, SAVE_REQUEST, whole_checkpoints
from dsrun.options.table import ParallelismOptions, PeftOptions
from dsrun.training import checkpoint, loop
from dsrun.training.engines import deepspeed
from dsrun.training.engines.checkpoints import resharding
from dsrun.training.engines.checkpoints.resharding import Piece, Saved, Shard
from dsrun.training.loss_check import LossCheck

pytestmark = pytest.mark.usefixtures("alone")


def a_job(
    run_dir: Path, keep: int = 2, ranks: int = 1, peft: PeftOptions | None = None, tp: int = 1, **zero
) -> SimpleNamespace:
    return SimpleNamespace(
        run_dir=str(run_dir),
        training=SimpleNamespace(keep_checkpoints=keep, save_steps=2, optimizer="adamw", async_save=False),
        world_size=ranks,
        precision="fp32",
        peft=peft or PeftOptions(),
        parallel=ParallelismOptions(tp=tp),
        fsdp=None,
        ds_config={"zero_optimization": {"stage": 2, **zero}, "optimizer": {"type": "AdamW"}},
    )


class Fake:
    """Saves as DeepSpeed does: files in a folder. what: called with the folder, after the first file."""

    module = device = train = eval = step = None

    def __init__(self, what=lambda folder: None) -> None:
        self.what = what
        self.loaded: list[str] = []
        self.frozen_is_left_out = self.strict = None

    def save_checkpoint(self, parent, tag, client_state, save_latest, exclude_frozen_parameters):
        self.frozen_is_left_out = exclude_frozen_parameters
        folder = Path(parent) / tag
        folder.mkdir(parents=True)
        (folder / "mp_rank_00_model_states.pt").write_bytes(b"x" * 1000)
        self.what(folder)
        (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_text(str(client_state["step"]))

    def load_checkpoint(self, parent, tag, load_module_strict):
        self.loaded.append(tag)
        self.strict = load_module_strict
        return parent, {"step": 7}


def behind(engine: Fake, job) -> deepspeed.DeepSpeed:
    engine.module = torch.nn.Linear(1, 1).requires_grad_(not job.peft.freezes)
    return deepspeed.DeepSpeed(engine, job)


def save(engine: Fake, job, step: int) -> Path:
    return checkpoint.save(behind(engine, job), job, step)


def load(engine: Fake, job, folder: Path) -> int:
    return checkpoint.load(behind(engine, job), folder)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def whole(run_dir: Path) -> list[str]:
    return [path.name for path in whole_checkpoints(run_dir)]


def fails(number: int):
    def what(folder: Path) -> None:
        raise OSError(number, os.strerror(number), str(folder / "file"))

    return what


# Whole or not at all


def test_the_mark_is_made_last(tmp_path):
    job, seen = a_job(tmp_path), []
    save(Fake(), job, 2)
    save(Fake(lambda folder: seen.append(whole(tmp_path))), job, 4)
    assert seen == [["step-2"]]
    assert whole(tmp_path) == ["step-2", "step-4"]
    mark = read_mark(tmp_path / "checkpoints/step-4")
    assert (mark.step, mark.layout) == (4, deepspeed.layout(job))
    state = WrittenFile(1, f"{zlib.crc32(b'4'):08x}", 0)
    weights = WrittenFile(1000, f"{zlib.crc32(b'x' * 1000):08x}", 0)
    assert mark.files == {
        "mp_rank_00_model_states.pt": weights,
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": state,
    }


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, keep):
    held = []
    for step in range(1, 6):
        engine = Fake(lambda folder: held.append(len(whole(tmp_path))))
        save(engine, a_job(tmp_path, keep), step)
    assert names(tmp_path) == [f"step-{step}" for step in range(6 - keep, 6)]
    assert held[1:] == [min(step, keep) for step in range(1, 5)], "whole ones while the next is written"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up(tmp_path, number):
    job = a_job(tmp_path, keep=1)
    save(Fake(), job, 2)
    with pytest.raises(DsrunError, match="the disk is full") as caught:
        save(Fake(fails(number)), job, 4)
    assert caught.value.problems[0].where == str(tmp_path / "checkpoints/step-4")
    assert whole(tmp_path) == ["step-2"]
    assert not list((tmp_path / "checkpoints/step-4").iterdir()), "the room is given back"
    save(Fake(), job, 6)
    assert names(tmp_path) == ["step-6"], "what was cut short is gone"


def test_what_torch_says_of_a_full_disk(tmp_path, monkeypatch):
    """torch.save's zip writer knows no errno."""

    def what(folder):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")

    with pytest.raises(DsrunError, match="the disk was full, or it fails"):
        save(Fake(what), a_job(tmp_path), 2)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=3, f_frsize=4096))
    with pytest.raises(DsrunError, match="the disk is full"):
        save(Fake(what), a_job(tmp_path), 2)
    assert whole(tmp_path) == []


def test_a_mark_that_can_not_reach_the_disk(tmp_path, monkeypatch):
    """The file is there, and nobody knows whether it will be after a power cut."""
    folder, sync = tmp_path / "checkpoints/step-4", os.fsync

    def fsync(handle):
        if (folder / MARK).exists():
            raise OSError(errno.EIO, "Input/output error")
        sync(handle)

    save(Fake(), a_job(tmp_path), 2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        with pytest.raises(DsrunError, match="Input/output error"):
            save(Fake(), a_job(tmp_path), 4)
    assert whole(tmp_path) == ["step-2"]


def test_another_error(tmp_path):
    def what(folder):
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        save(Fake(what), a_job(tmp_path), 2)
    with pytest.raises(DsrunError, match="Read-only file system"):
        save(Fake(fails(errno.EROFS)), a_job(tmp_path), 2)


def test_an_end_in_the_middle(tmp_path):
    def what(folder):
        raise SystemExit(143)

    save(Fake(), a_job(tmp_path), 2)
    with pytest.raises(SystemExit):
        save(Fake(what), a_job(tmp_path), 4)
    assert names(tmp_path) == ["step-2", "step-4"]
    assert whole(tmp_path) == ["step-2"]


def test_the_same_step_again(tmp_path):
    """Files of ranks that are no more would be taken for a part of it."""
    folder = tmp_path / "checkpoints/step-4"
    save(Fake(), a_job(tmp_path), 2)
    save(Fake(), a_job(tmp_path), 4)
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_text("stale")
    seen = []
    save(Fake(lambda folder: seen.append(whole(tmp_path))), a_job(tmp_path), 4)
    assert seen == [["step-2"]]
    assert len(list(folder.glob("zero_pp_rank_*"))) == 1


def test_everything_reaches_the_disk_before_the_mark(tmp_path, monkeypatch):
    synced: list[str] = []
    folder = tmp_path / "checkpoints/step-2"
    rename = Path.rename

    def fsync(handle):
        synced.append(str(Path(f"/proc/self/fd/{handle}").readlink()))

    def renamed(self, target):
        if Path(target).name == MARK:
            files = {str(path) for path in folder.iterdir()}
            assert files <= set(synced)
            assert {str(folder), str(folder.parent)} <= set(synced), "the names, too"
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    save(Fake(), a_job(tmp_path), 2)
    assert (folder / MARK).exists()
    assert synced[-1] == str(folder), "the mark's own name"


def test_an_old_one_that_can_not_be_removed(tmp_path, monkeypatch):
    job = a_job(tmp_path, keep=1)
    save(Fake(), job, 2)

    def busy(path):
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)
        save(Fake(), job, 4)
    assert names(tmp_path) == ["step-2", "step-4"]
    assert whole(tmp_path) == ["step-4"]


def test_one_that_nobody_needs_any_more(tmp_path):
    job = a_job(tmp_path)
    one, other = (save(Fake(), job, step) for step in (2, 4))
    (tmp_path / "checkpoints/zero_to_fp32.py").touch()
    checkpoint.remove(one)
    assert whole(tmp_path) == ["step-4"]
    checkpoint.remove(other)
    assert not (tmp_path / "checkpoints").exists()


# Which one is gone on from


def written(job, *steps: int) -> list[Path]:
    """Whole checkpoints of files that torch can read."""

    def make(folder: Path, step: int) -> Path:
        folder.mkdir(parents=True)
        torch.save(
            {"step": step, "weights": torch.full((50,), float(step))}, folder / "mp_rank_00_model_states.pt"
        )
        torch.save({"step": step}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        return folder

    return [checkpoint.save(SimpleNamespace(save=make), job, step) for step in steps]


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def test_the_newest_whole_one(tmp_path):
    job, notes = a_job(tmp_path, keep=9), []
    assert checkpoint.choose(job, notes.append) is None
    one, two, three, four = written(job, 2, 4, 6, 8)
    assert checkpoint.choose(job, notes.append) == four
    assert notes == []
    flipped(four / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (three / "mp_rank_00_model_states.pt").unlink()
    assert checkpoint.choose(job, notes.append) == two
    assert [line.partition(":")[0] for line in notes] == ["step-6 is damaged", "step-8 is damaged"]
    assert all(line.endswith("the run goes on from step-4") for line in notes)
    assert whole(tmp_path) == [one.name, two.name]
    assert [state.damaged for state in states(tmp_path)] == [False, False, True, True]
    written(job, 6)
    assert names(tmp_path) == ["step-2", "step-4", "step-6"], "what is aside makes room"


def test_one_that_was_cut_short_is_named(tmp_path):
    job, notes = a_job(tmp_path, keep=9), []
    one, two = written(job, 2, 4)
    (two / MARK).unlink()
    assert checkpoint.choose(job, notes.append) == one
    assert notes == ["step-4 is incomplete: it was not written to its end: the run goes on from step-2"]


def test_none_can_be_read(tmp_path):
    """It is not begun again unasked; and what is said next doesn't lead back to the same file."""
    job = a_job(tmp_path, keep=9)
    for folder in written(job, 2, 4):
        (folder / MARK).write_text("")
    with pytest.raises(TrainingError, match="none of its checkpoints can be read") as caught:
        checkpoint.choose(job, print)
    assert "step-2 is damaged" in str(caught.value) and "step-4 is damaged" in str(caught.value)
    assert whole(tmp_path) == []
    with pytest.raises(DsrunError, match="none of its checkpoints"):
        newest_whole(tmp_path)


def test_one_that_the_user_names(tmp_path):
    job, notes = a_job(tmp_path, keep=9), []
    _, two, _ = written(job, 2, 4, 6)
    put_choice(tmp_path, CheckpointChoice(4))
    assert checkpoint.choose(job, notes.append) == two
    assert notes == ["step-6 is put aside: the run goes on from step-4"]
    assert whole(tmp_path) == ["step-2", "step-4"]
    written(job, 6)
    assert checkpoint.choose(job, notes.append).name == "step-6", (
        "a restart goes on from what was written since"
    )
    put_choice(tmp_path, CheckpointChoice(4))
    flipped(two / "mp_rank_00_model_states.pt")
    with pytest.raises(TrainingError, match="is damaged: the digest of mp_rank_00") as caught:
        checkpoint.choose(job, notes.append)
    assert "Take another: --checkpoint N (there are: 2, 6)." in str(caught.value)
    assert len(whole(tmp_path)) == 3, "nothing is put aside for a checkpoint that can't be taken"
    put_choice(tmp_path, CheckpointChoice(5))
    with pytest.raises(TrainingError, match="no whole checkpoint after step 5"):
        checkpoint.choose(job, notes.append)


def test_without_digests_sizes_and_names_are_looked_at(tmp_path):
    job, notes = a_job(tmp_path, keep=9), []
    one, two = written(job, 2, 4)
    put_choice(tmp_path, CheckpointChoice(digests=False))
    content = (two / "mp_rank_00_model_states.pt").read_bytes()
    place = content.index(torch.full((50,), 4.0).numpy().tobytes()) + 7
    (two / "mp_rank_00_model_states.pt").write_bytes(content[:place] + b"\1" + content[place + 1 :])
    assert checkpoint.choose(job, notes.append) == two
    (two / "mp_rank_00_model_states.pt").write_bytes(bytes(len(content)))
    assert checkpoint.choose(job, notes.append) == one
    assert "mp_rank_00_model_states.pt" in notes[0]


def test_what_may_be_over_in_a_minute_is_no_damage(tmp_path, monkeypatch):
    job = a_job(tmp_path, keep=9)
    written(job, 2, 4)

    def refuse(*_):
        raise OSError(errno.ESTALE, "Stale file handle", "a.pt")

    with monkeypatch.context() as patched:
        patched.setattr("dsrun.job.checkpoints._digest", refuse)
        with pytest.raises(TrainingError, match="Stale file handle"):
            checkpoint.choose(job, print)
    assert whole(tmp_path) == ["step-2", "step-4"]


@pytest.mark.parametrize("marked", [True, False])
def test_one_that_asks_for_code_ends_the_run(tmp_path, marked):
    """Nothing is gone on with: no accident makes such a file. With a mark that fits it, and with an old one."""
    job = a_job(tmp_path, keep=9)
    _, two = written(job, 2, 4)
    file = two / "mp_rank_00_model_states.pt"
    torch.save({"step": 4, "more": Evil(tmp_path / "evil")}, file)
    mark = read_mark(two)
    files = {**mark.files, file.name: WrittenFile.of(file, 0)} if marked else {}
    text = (
        replace(mark, files=files).text() if marked else json.dumps({"step": 4, "layout": dict(mark.layout)})
    )
    (two / MARK).write_text(text)
    with pytest.raises(TrainingError, match="this checkpoint asks for code") as caught:
        checkpoint.choose(job, print)
    assert "Take another: --checkpoint N (there are: 2)." in str(caught.value)
    assert not (tmp_path / "evil").exists()
    assert whole(tmp_path) == ["step-2", "step-4"]


def test_shares_of_the_ranks(monkeypatch):
    """Each file is looked at by one rank; none has much more to read than another."""
    files = {
        f"f{number}": WrittenFile(size, "", 0) for number, size in enumerate([900, 10, 500, 400, 20, 30, 5])
    }
    monkeypatch.setattr(checkpoint.dist, "get_world_size", lambda: 3)
    shares = []
    for rank in range(3):
        monkeypatch.setattr(checkpoint.dist, "get_rank", lambda rank=rank: rank)
        shares.append(checkpoint._share(Mark(1, {}, files), list(files)))
    assert sorted(name for share in shares for name in share) == sorted(files)
    assert max(sum(files[name].bytes for name in share) for share in shares) == 900
    shares = []
    for rank in range(3):
        monkeypatch.setattr(checkpoint.dist, "get_rank", lambda rank=rank: rank)
        shares.append(checkpoint._share(Mark(1, {}), list(files)))
    assert sorted(map(len, shares)) == [2, 2, 3], "of an old mark, whose sizes nobody knows"


def test_a_folder_that_is_named_like_a_ranks(tmp_path):
    """Every file is written down by somebody, wherever the run lies."""
    job = a_job(tmp_path / "rank7" / "run")
    (folder,) = written(job, 2)
    assert {one.rank for one in read_mark(folder).files.values()} == {0}
    assert len(read_mark(folder).files) == 2


# Who reads it


@pytest.mark.parametrize("method", ["full", "lora", "ptuning"])
def test_what_is_not_trained_is_in_no_checkpoint(tmp_path, method):
    engine, job = Fake(), a_job(tmp_path, peft=PeftOptions(method=method))
    load(engine, job, save(engine, job, 2))
    assert engine.frozen_is_left_out == (method != "full")
    assert engine.strict == (method == "full")


def test_the_same_division_is_read_by_deepspeed(tmp_path, monkeypatch):
    monkeypatch.setattr(resharding, "load", lambda engine, folder, **_: 9)
    folder = save(Fake(), a_job(tmp_path), 2)
    engine = Fake()
    assert load(engine, a_job(tmp_path), folder) == 7
    assert engine.loaded == ["step-2"]
    for other in (
        a_job(tmp_path, ranks=2),
        a_job(tmp_path, stage=3),
        a_job(tmp_path, offload_optimizer={"device": "cpu"}),
    ):
        assert load(engine, other, folder) == 9


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("zero_pp_rank_1_mp_rank_01_optim_states.pt", 3), ("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", 4),
        ("mp_rank_01_model_states.pt", 1), ("zero_to_fp32.py", 0), ("rank5/optimizer.swp", 5),
    ],
)  # fmt: skip
def test_a_file_of_neighbours_is_its_writers(tmp_path, name, rank):
    assert deepspeed.rank_of(a_job(tmp_path, tp=2), tmp_path / name) == rank


def test_parts_of_matrices_are_put_together_for_other_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(resharding, "load", lambda _, __, *, tp, wrote, experts: (tp, wrote))
    folder = save(Fake(), a_job(tmp_path, ranks=4, tp=2), 2)
    assert load(Fake(), a_job(tmp_path, ranks=4, tp=2), folder) == 7
    assert load(Fake(), a_job(tmp_path, ranks=4), folder) == (1, 2)
    assert load(Fake(), a_job(tmp_path, ranks=2, tp=2), folder) == (2, 2)
    assert load(Fake(), a_job(tmp_path, ranks=4, tp=4), folder) == (4, 2)


def test_a_mark_that_says_nothing(tmp_path, monkeypatch):
    """As that of an older dsrun; what is no mark at all is damage."""
    monkeypatch.setattr(resharding, "load", lambda engine, folder, **_: 9)
    folder = save(Fake(), a_job(tmp_path), 2)
    (folder / MARK).write_text("{}")
    assert load(Fake(), a_job(tmp_path), folder) == 9
    for text in ("", "[]", "no json", '{"layout": 1}'):
        (folder / MARK).write_text(text)
        with pytest.raises(DsrunError, match="is damaged: its mark"):
            load(Fake(), a_job(tmp_path), folder)


def test_swap_files_are_not_resharded(tmp_path):
    on_nvme = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/one"}}
    folder = save(Fake(), a_job(tmp_path, **on_nvme), 2)
    elsewhere = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/two"}}
    assert load(Fake(), a_job(tmp_path, **elsewhere), folder) == 7
    for other in (a_job(tmp_path, ranks=2, **on_nvme), a_job(tmp_path)):
        with pytest.raises(DsrunError, match="NVMe"):
            load(Fake(), other, folder)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_file_that_would_run_code(tmp_path):
    trace = tmp_path / "evil"
    torch.save({"optimizer": Evil(trace)}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(DsrunError, match="checkpoint"):
        resharding.read(tmp_path, {})
    assert not trace.exists()


@pytest.mark.parametrize("content", [{"step": 1}, {"optimizer": {}}, {}])
def test_a_file_that_is_no_checkpoint(tmp_path, content):
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(DsrunError, match="checkpoint"):
        resharding.read(tmp_path, {})


@pytest.mark.parametrize("fused", [True, False])
def test_what_stage_0_in_fp16_wrote(tmp_path, fused):
    """Its master weights, Adam's moments, and what the loss scaler has learnt."""
    master = {"a": torch.arange(6.0), "b": torch.arange(6.0, 8.0)}
    scaling = {"cur_scale": 2.0**11, "cur_iter": 9, "last_overflow_iter": 4, "cur_hysteresis": 2}
    moments = [{"step": 7, "exp_avg": -tensor, "exp_avg_sq": tensor**2} for tensor in master.values()]
    if fused:
        flat = torch.cat([*master.values()])
        weights = {"fp32_groups_flat": [flat]}
        moments = [{"step": 7, "exp_avg": -flat, "exp_avg_sq": flat**2}]
    else:
        weights = {"fp32_groups": [list(master.values())]}
    places = list(range(len(moments)))
    inner = {"param_groups": [{"params": places}], "state": dict(zip(places, moments, strict=True))}
    counters = {"step": 5, "global_steps": 7, "global_samples": 56, "skipped_steps": 2}
    content = {"optimizer": {**weights, **scaling, "optimizer_state_dict": inner}, **counters}
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    saved = resharding.read(tmp_path, {"a": 6, "b": 2})
    assert (saved.scaling, saved.adam_steps, saved.counters) == (scaling, 7, counters)
    target = Shard(torch.zeros(8), {}, resharding._in_a_row({"a": 6, "b": 2}))
    resharding._fill(target, saved, tmp_path)
    whole = torch.arange(8.0)
    assert torch.equal(target.weights, whole)
    assert torch.equal(target.states["exp_avg"], -whole)
    assert torch.equal(target.states["exp_avg_sq"], whole**2)


def test_an_empty_folder(tmp_path):
    with pytest.raises(DsrunError, match="checkpoint"):
        resharding.read(tmp_path, {})


# Resharding

SIZES = {"wte": 13, "a": 1, "b": 7, "c": 0, "norm": 5, "head": 26}


def values() -> dict[str, torch.Tensor]:
    return {name: torch.arange(size) + 100.0 * place for place, (name, size) in enumerate(SIZES.items())}


def shares(ranks: int) -> list[list[Piece]]:
    """As stage 3."""
    return [resharding._shares(SIZES, rank, ranks) for rank in range(ranks)]


def runs(ranks: int) -> list[list[Piece]]:
    """As stages 1 and 2: all weights in a row, cut into equal parts, of which the last may be padded."""
    part = -(-sum(SIZES.values()) // ranks)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    for piece in resharding._in_a_row(SIZES):
        done = 0
        while done < piece.count:
            rank, place = divmod(piece.offset + done, part)
            count = min(piece.count - done, part - place)
            pieces[rank].append(Piece(piece.name, done, place, count))
            done += count
    return pieces


def apart(ranks: int) -> list[list[Piece]]:
    """As stage 0 in fp32: a tensor for each weight."""
    return [[Piece(name, 0, 0, size)] for name, size in SIZES.items()]


def filled(pieces: list[Piece]) -> Shard:
    size = max((piece.offset + piece.count for piece in pieces), default=0) + 3
    weights, first, second = torch.zeros(size), torch.zeros(size), torch.zeros(size)
    for piece in pieces:
        span = slice(piece.offset, piece.offset + piece.count)
        weights[span] = values()[piece.name][piece.first : piece.first + piece.count]
        first[span], second[span] = weights[span] / 3, weights[span] ** 2
    return Shard(weights, {"exp_avg": first, "exp_avg_sq": second}, pieces)


@pytest.mark.parametrize("to", [shares, runs, apart])
@pytest.mark.parametrize("source", [shares, runs, apart])
@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (2, 3), (5, 4), (64, 7)])
def test_every_division_becomes_every_other(source, to, before, now):
    saved = Saved([filled(pieces) for pieces in source(before)], 4, {}, {})
    for pieces in to(now):
        wanted = filled(pieces)
        got = Shard(torch.full_like(wanted.weights, -1), {}, pieces)
        resharding._fill(got, saved, Path("/x"))
        for piece in pieces:
            span = slice(piece.offset, piece.offset + piece.count)
            assert torch.equal(got.weights[span], wanted.weights[span])
        for name, tensor in got.states.items():
            assert torch.equal(tensor, wanted.states[name]), "and zero between"


def test_a_part_that_is_missing():
    shards = [filled(pieces) for pieces in runs(4)][:-1]
    with pytest.raises(DsrunError, match="of 26 elements of head"):
        resharding._fill(filled(runs(1)[0]), Saved(shards, 4, {}, {}), Path("/x"))


@pytest.mark.parametrize("kind", ["torch", "deepspeed"])
def test_how_an_optimizer_counts(kind):
    weights = torch.nn.Parameter(torch.zeros(3))
    inner = torch.optim.AdamW([weights])
    if kind == "deepspeed":
        inner = type("FusedAdam", (torch.optim.Optimizer,), {"__module__": "deepspeed.ops.adam"})(
            [weights], {}
        )
    resharding._put_states(
        SimpleNamespace(optimizer=inner), Shard(weights, {"exp_avg": torch.ones(3)}, []), 4
    )
    step = inner.state[weights]["step"]
    assert step == 4
    assert torch.is_tensor(step) == (kind == "torch")


# A checkpoint on request


def test_a_request(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    path = tmp_path / SAVE_REQUEST
    path.parent.mkdir()
    requests = loop.Requests(tmp_path)
    assert requests.look() == loop.NOTHING
    path.write_text("")
    now[0] += 0.9
    assert requests.look() == loop.NOTHING, "looked less than a second ago"
    now[0] += 0.2
    assert requests.look() == loop.SAVE
    path.write_text("stop\n")
    now[0] += 1
    assert requests.look() == loop.STOP
    requests.done()
    requests.done()
    now[0] += 1
    assert requests.look() == loop.NOTHING


def trainer(tmp_path, wishes: dict[int, int], monkeypatch) -> tuple[loop.Trainer, list]:
    """A trainer of 6 steps in which the ranks are asked for something; and what it does."""
    did: list = []
    made = loop.Trainer.__new__(loop.Trainer)
    made.job, made.run_dir, made.rank = a_job(tmp_path), tmp_path, 0
    made.total_steps, made.eval_steps = 6, 3
    made.engine = SimpleNamespace(train=lambda: None, non_finite=lambda: None, device=torch.device("cpu"))
    made._make = lambda step: None
    made.loss_check = SimpleNamespace(troubled=False, weight=LossCheck.weight)
    made.report = SimpleNamespace(
        phase=lambda text: None,
        event=lambda kind, **fields: did.append((kind, fields["step"], fields.get("requested"))),
        stopped=lambda: did.append("stopped"),
        truncate_metrics=lambda step: None,
    )
    made.requests = SimpleNamespace(done=lambda: did.append("done"))
    made._step = lambda step, _: wishes.get(step + 1, loop.NOTHING)
    made._evaluate = lambda step: did.append(("eval", step))
    monkeypatch.setattr(checkpoint, "save", lambda engine, job, step: tmp_path)
    return made, did


def test_checkpoints_of_a_run(tmp_path, monkeypatch):
    made, did = trainer(tmp_path, {}, monkeypatch)
    assert made._train(0) is None
    assert did == [("checkpoint", 2, None), ("eval", 3), ("checkpoint", 4, None)]


def test_no_checkpoint_without_a_finite_loss(tmp_path, monkeypatch):
    made, did = trainer(tmp_path, {}, monkeypatch)
    made.loss_check.troubled = True
    made._train(0)
    assert did == [("eval", 3)]


def test_no_checkpoint_of_weights_that_are_not_finite(tmp_path, monkeypatch):
    made, did = trainer(tmp_path, {}, monkeypatch)
    made.engine.non_finite = lambda: "model.norm.weight"
    made.loss_check = LossCheck(
        SimpleNamespace(precision="fp32", training=SimpleNamespace(lr=1.0, warmup_steps=0))
    )
    with pytest.raises(TrainingError, match=r"not finite since step 2\n.*model.norm.weight"):
        made._train(0)
    assert did == []


def test_a_checkpoint_on_request(tmp_path, monkeypatch):
    made, did = trainer(tmp_path, {5: loop.SAVE}, monkeypatch)
    assert made._train(3) is None
    assert did == [("checkpoint", 4, None), "done", ("checkpoint", 5, True)]


@pytest.mark.parametrize("step", [3, 6])
def test_an_end_on_request(tmp_path, monkeypatch, step):
    made, did = trainer(tmp_path, {step: loop.STOP}, monkeypatch)
    assert made._train(2) == step
    assert did[-2:] == ["done", ("checkpoint", step, True)]
    assert ("eval", 6) not in did


# A model from a checkpoint


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_whole_weights_of_what_stage_3_divided(tmp_path, ranks):
    wanted = {name: tensor.view(-1, 1) for name, tensor in values().items()}
    for rank, pieces in enumerate(shares(ranks)):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        state = {"fp32_flat_groups": [filled(pieces).weights]}
        torch.save({"optimizer_state_dict": state}, tmp_path / f"bf16_{name}_optim_states.pt")
        shapes = [{name: tensor.shape for name, tensor in wanted.items()}]
        torch.save({"module": {}, "param_shapes": shapes}, tmp_path / f"{name}_model_states.pt")
    read = resharding.trained_weights(tmp_path)
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in wanted.items())


def test_whole_weights_of_the_other_stages(tmp_path):
    weights = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}
    torch.save({"module": {**weights, "count": 3}}, tmp_path / "mp_rank_00_model_states.pt")
    read = resharding.trained_weights(tmp_path)
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())


def test_weights_in_swap_files_are_not_whole(tmp_path):
    torch.save(
        {"module": {}, "param_shapes": [{"a": torch.Size([9])}]}, tmp_path / "mp_rank_00_model_states.pt"
    )
    state = {"optimizer_state_dict": {"fp32_flat_groups": [torch.zeros(1)]}}
    torch.save(state, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(DsrunError, match="NVMe"):
        resharding.trained_weights(tmp_path)


# The best model


def test_the_lowest_loss_is_kept(tmp_path, monkeypatch):
    made, did = trainer(tmp_path, {}, monkeypatch)
    losses = iter([1.0, 3.0, 2.0, 2.5, 1.5])
    monkeypatch.setattr(loop, "evaluation_loss", lambda *_: next(losses))
    monkeypatch.setattr(loop, "export_best", lambda *_: tmp_path / "best")
    made.job.training.keep_best, made.job.training.compute_metrics = True, False
    made.eval_examples, made.last_eval, made.best_loss = (
        SimpleNamespace(with_question=True),
        None,
        float("inf"),
    )
    made.tokenizer, made.end_ids = SimpleNamespace(pad_token_id=0), []
    made.loss_check = LossCheck(SimpleNamespace(precision="fp32", ds_config={}))
    made.report.metrics = lambda **fields: None
    for step in (0, 2, 4, 5, 6):
        loop.Trainer._evaluate(made, step)
    assert [fields for kind, *fields in did if kind == "best"] == [[2, None], [4, None], [6, None]]


def test_weights_that_gave_a_loss_that_is_no_number_are_not_gone_on_with(tmp_path):
    for step in (2, 4):
        folder = tmp_path / CHECKPOINTS / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / MARK).write_text("{}")
    checkpoint.doubt(tmp_path, 4)
    checkpoint.doubt(tmp_path, 3)  # there is none
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step-2"]
    assert (tmp_path / CHECKPOINTS / "step-4" / DOUBTFUL).is_file()


def test_the_step_that_diverges_takes_the_mark_off(tmp_path):
    folder = tmp_path / CHECKPOINTS / "step-1"
    folder.mkdir(parents=True)
    (folder / MARK).write_text("{}")
    trainer = object.__new__(loop.Trainer)
    trainer.run_dir, trainer.rank, trainer.total_steps = tmp_path, 0, 9
    trainer.job = SimpleNamespace(world_size=1)
    trainer.engine = SimpleNamespace(train=lambda: None, device=torch.device("cpu"))
    trainer._make = lambda step: None
    trainer.report = SimpleNamespace(phase=lambda text: None)
    training = SimpleNamespace(lr=1e18)
    trainer.loss_check = LossCheck(SimpleNamespace(precision="fp32", training=training, ds_config={}))
    trainer._step = lambda step, _: trainer.loss_check.training(step + 1, float("nan"), None)
    with pytest.raises(TrainingError, match="since step 2"):
        trainer._train(1)
    assert whole_checkpoints(tmp_path) == []
    assert (folder / DOUBTFUL).is_file()
