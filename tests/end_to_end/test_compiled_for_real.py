"""finetune --compile on two ranks, with code that the machine's compiler makes: the same losses and the same export."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from running import finish, lines_of, same, words_of

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module", params=["zero2", "ddp", "zero1", "fsdp"])
def run(request, tmp_path_factory, dsrun_here, data):
    run_dir = tmp_path_factory.mktemp("compiled") / "run"
    words = (*words_of("llama-tiny", run_dir), *data, "--compile", "--preset", request.param)
    done = finish(dsrun_here(*words), run_dir, timeout=900)
    assert done.code == 0, done.err
    return done


def test_losses_stay(run, reference):
    same(run.losses, reference.losses, 1e-4)
    assert run.last_eval == pytest.approx(reference.last_eval, abs=1e-4)


def test_the_run_says_what_was_compiled(run):
    notes = [line["text"] for line in lines_of(run.run_dir / "events.jsonl") if line["event"] == "note"]
    told = [text for text in notes if text.startswith("torch.compile: ")]
    assert told and not any("limit" in text for text in notes)
    graphs = int(told[-1].split()[1])
    assert 0 < graphs < 8, "lengths differ at each of ten steps"


def test_the_export_has_the_same_names(run, reference):
    files = [safetensors.load_file(one.run_dir / "model" / "model.safetensors") for one in (run, reference)]
    assert set(files[0]) == set(files[1])
