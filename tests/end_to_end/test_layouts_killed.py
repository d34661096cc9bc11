"""Tensor, sequence and pipeline parallelism under the real launcher: a rank is killed, and the run goes on."""

from __future__ import annotations

import json
import os
import signal

import pytest

pytest.importorskip("deepspeed")
transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from running import answer_alike, cut_off, finish, held_at, let_go, same, starts_of, words_of

pytestmark = [pytest.mark.slow, pytest.mark.full]
LAYOUTS = {"tp": ("--preset", "zero1"), "sp": ("--preset", "zero3"), "pp": ("--preset", "zero1")}


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request, tmp_path_factory, dsrun_here, data):
    """Both ranks work on the same examples, with the reference run's step; the second is killed after step 5."""
    kind = request.param
    run_dir = tmp_path_factory.mktemp(kind) / "run"
    words = (*words_of("llama-tiny", run_dir), *data, f"--{kind}", "2", "--grad-accum", "2", *LAYOUTS[kind])
    process = dsrun_here(*words)
    ranks = held_at(process, run_dir, 5)
    os.kill(ranks[1], signal.SIGKILL)
    let_go(ranks)
    assert finish(process, run_dir).code != 0
    assert json.loads((run_dir / "job.json").read_text())["parallel"][kind] == 2
    return finish(dsrun_here("resume", run_dir), run_dir)


def test_it_goes_on_where_it_was_killed_with_the_undisturbed_losses(run, reference):
    assert run.code == 0, run.err
    assert starts_of(run.run_dir) == [0, 4]
    same(run.losses, reference.losses)
    assert run.last_eval == pytest.approx(reference.last_eval, abs=1e-5)


def test_the_model_answers_as_one_without_it(run, reference):
    """Whole, in a folder that transformers loads by itself."""
    answer_alike(run.run_dir, reference.run_dir)


def test_it_goes_on_without_groups_where_its_parts_can_be_read(run, dsrun, dsrun_here, tmp_path, reference):
    """Two data-parallel ranks under another stage, from the last checkpoint; stages of a pipeline stay as they are."""
    kind = next(name for name, size in json.loads(run.read("job.json"))["parallel"].items() if size > 1)
    cut_off(run.run_dir, 8, tmp_path / "run")
    if kind == "pp":
        said = dsrun("resume", tmp_path / "run", "--preset", "zero2")
        assert said.code == 1 and "--pp 2" in said.err
        return
    preset = "zero3" if kind == "tp" else "zero2"
    done = finish(
        dsrun_here("resume", tmp_path / "run", f"--{kind}", "1", "--preset", preset), tmp_path / "run"
    )
    assert done.code == 0, done.err
    same(done.losses, reference.losses)


@pytest.mark.parametrize(("words", "preset"), [(("--tp", "2"), "zero1"), (("--sp", "2"), "zero3")])
def test_a_run_without_groups_goes_on_with_them(words, preset, dsrun_here, tmp_path, reference):
    cut_off(reference.run_dir, 8, tmp_path / "run")
    done = finish(dsrun_here("resume", tmp_path / "run", *words, "--preset", preset), tmp_path / "run")
    assert done.code == 0, done.err
    same(done.losses, reference.losses)


def test_a_checkpoint_of_parts_is_exported_whole(run, dsrun, tmp_path, reference):
    """But for what AdamW makes of gradients that are next to nothing, whose sign is rounding's; weights are 0.02."""
    models = []
    for number, one in enumerate((run, reference)):
        folder = tmp_path / str(number)
        said = dsrun("export", one.run_dir, "--checkpoint", 8, "-o", folder)
        assert said.code == 0, said.err
        models.append(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())
    for name, weight in models[1].items():
        torch.testing.assert_close(models[0][name], weight, atol=5e-4, rtol=0)
