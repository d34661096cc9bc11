"""Plans judged again by a trace: real recordings, the cache, and everything that can go wrong on the way."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from dsrun.jobs.assembly.checks import memory_check
from dsrun.jobs.assembly.planning import recordings, search
from dsrun.jobs.assembly.planning.traced import Tracer, rejudged, retraced
from dsrun.planner.plan import FITS, OUT, Calibration, MemoryBudget, judge
from dsrun.planner.setup import Setup
from dsrun.planner.shape import config_of, from_config
from dsrun.planner.speed import Hardware
from dsrun.planner.trace.request import UntraceableError, request_of
from dsrun.planner.trace.schedule import drawn_lengths
from dsrun.words import GIB

CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
}  # fmt: skip
A100 = Hardware(matrix_tflops=312, fp32_tflops=19.5, memory_gb_s=2039, link_gb_s=230)
LORA = {"rank": 8, "target": "all", "dropout": 0.0}
SETUP = Setup(
    shape=from_config(CONFIG, "config.json"), engine="torch", precision="pure", micro_batch=4, seq_len=1024,
    fused_adam=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def answered(tmp_path_factory) -> dict[str, dict[str, object]]:
    """Recordings of the setup without and with recomputed blocks, as the process answers: key -> answer."""
    setups = (SETUP, SETUP.changed(checkpointing=1))
    requests = {
        recordings.key_of(made): made for made in (request_of(setup, CONFIG, LORA) for setup in setups)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSRUN_CACHE", str(tmp_path_factory.mktemp("cache")))
        assert recordings.record(requests, 600) == ""
        return {key: dict(recordings.cached(key) or {}) for key in requests}


@pytest.fixture
def starts(answered, monkeypatch, tmp_path) -> list[list[str]]:
    """An empty cache, and a process that answers at once. The commands that were started."""
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(recordings, "_ANSWERS", {})
    started: list[list[str]] = []

    def run(command, *, input, **_):
        started.append(command)
        lines = [json.dumps(answered[recordings.key_of(one)]) for one in json.loads(input)]
        return subprocess.CompletedProcess(command, 0, "\n".join(lines), "")

    monkeypatch.setattr(recordings.subprocess, "run", run)
    return started


def budget(gib: float, **fields) -> MemoryBudget:
    return MemoryBudget(1, 1, gib * GIB, A100, **fields)


def plans_of(*setups: Setup, gib: float = 80, **fields) -> tuple[search.RankedPlans, MemoryBudget]:
    room = budget(gib, **fields)
    judged = [judge(f"preset-{number}", setup, room) for number, setup in enumerate(setups)]
    return search.RankedPlans(judged, {}, None), room


def test_a_plan_is_judged_by_its_trace(starts):
    plans, room = plans_of(SETUP)
    again, notes = retraced(plans, room, Tracer(CONFIG, LORA))
    (plan,) = again.plans
    assert plan.gpu.traced is not None
    assert plan.gpu.allocated == pytest.approx(plans.plans[0].gpu.allocated, rel=0.03)
    assert plan.gpu.allocated <= plan.gpu.traced.capacity <= plan.gpu.reserved
    assert sum(plan.at_peak.values()) == pytest.approx(plan.gpu.allocated)
    assert notes == []
    assert len(starts) == 1
    assert starts[0][0] == sys.executable
    retraced(plans, room, Tracer(CONFIG, LORA))
    assert len(starts) == 1, "the second plan finds it in the cache"


def test_finetune_and_preset_take_what_is_cached_and_make_nothing(starts, answered):
    """They plan by formula until `plan` has made the recording."""
    plans, room = plans_of(SETUP)
    before, notes = retraced(plans, room, Tracer(CONFIG, LORA, makes=False))
    assert (before.plans[0].gpu.traced, notes, starts) == (None, [], [])
    retraced(plans, room, Tracer(CONFIG, LORA))
    assert len(starts) == 1
    job = memory_check.MemoryRequest(
        architecture=CONFIG,
        name="a model",
        devices=[0],
        precision="bf16",
        seq_len=1024,
        micro_batch=4,
        grad_accum=1,
    )
    again = rejudged(plans.plans[0], room, job.tracer)
    assert again.gpu.traced is not None and len(starts) == 1
    assert again.gpu.allocated == retraced(plans, room, Tracer(CONFIG, LORA))[0].plans[0].gpu.allocated
    corrected = replace(room, calibration=Calibration(moving=1.1))
    assert rejudged(plans.plans[0], corrected, job.tracer) is plans.plans[0]


def test_other_versions_are_traced_anew(starts, monkeypatch):
    first = recordings.key_of(request_of(SETUP, CONFIG, LORA))
    monkeypatch.setattr(recordings.packages, "installed_version", lambda _: "999")
    assert recordings.key_of(request_of(SETUP, CONFIG, LORA)) != first


def test_a_damaged_entry_is_made_again(starts):
    plans, room = plans_of(SETUP)
    retraced(plans, room, Tracer(CONFIG, LORA))
    recordings._ANSWERS.clear()
    (entry,) = recordings._path("x").parent.iterdir()
    entry.write_text(entry.read_text()[:100])
    again, _ = retraced(plans, room, Tracer(CONFIG, LORA))
    assert again.plans[0].gpu.traced is not None
    assert len(starts) == 2


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(starts, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "file" / "cache"))
    plans, room = plans_of(SETUP)
    again, notes = retraced(plans, room, Tracer(CONFIG, LORA))
    assert again.plans[0].gpu.traced is not None
    assert notes == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (subprocess.TimeoutExpired("dsrun", 25, output=b'{"rec'), "more than"),
        (OSError(12, "Cannot allocate memory"), "can't be started: Cannot allocate memory"),
        (subprocess.CompletedProcess([], -9, "", "Killed"), "Killed"),
        (subprocess.CompletedProcess([], 0, '{"error": "ValueError: no such model"}', ""), "no such model"),
    ],
)
def test_without_a_trace_the_formulas_stay(starts, monkeypatch, fault, said):
    def run(*_, **__):
        if isinstance(fault, Exception):
            raise fault
        return fault

    monkeypatch.setattr(recordings.subprocess, "run", run)
    plans, room = plans_of(SETUP)
    again, notes = retraced(plans, room, Tracer(CONFIG, LORA))
    assert again.plans == plans.plans
    assert [said in note for note in notes] == [True]


def test_an_answer_that_came_in_time_counts(starts, monkeypatch, answered):
    """Of two recordings the first was written when the time was over."""
    first = json.dumps(answered[recordings.key_of(request_of(SETUP, CONFIG, LORA))])

    def run(*_, **__):
        raise subprocess.TimeoutExpired("dsrun", 25, output=f"{first}\n{first[:50]}".encode())

    monkeypatch.setattr(recordings.subprocess, "run", run)
    plans, room = plans_of(SETUP, SETUP.changed(checkpointing=1))
    again, notes = retraced(plans, room, Tracer(CONFIG, LORA))
    assert {plan.preset: plan.gpu.traced is not None for plan in again.plans} == {
        "preset-0": True,
        "preset-1": False,
    }
    assert len(notes) == 1


def test_ranks_on_cpus_and_measured_machines_are_left_alone(starts):
    for fields in ({"accelerator": "cpu"}, {"calibration": Calibration(moving=1.1)}):
        plans, room = plans_of(SETUP, **fields)
        assert retraced(plans, room, Tracer(CONFIG, LORA)) == (plans, [])
    assert starts == []


def test_another_model_than_the_planned_one_is_not_taken(starts, answered, monkeypatch):
    other = from_config({**CONFIG, "num_hidden_layers": 24}, "config.json")
    plans, room = plans_of(SETUP.changed(shape=other))
    again, (note,) = retraced(plans, room, Tracer(CONFIG, LORA))
    assert again.plans[0].gpu.traced is None
    assert "weights" in note


@pytest.mark.parametrize(
    "fields",
    [{"tile": 512}, {"activations_device": "cpu", "checkpointing": 1}, {"method": "lora", "targets": ()}],
)
def test_what_no_trace_shows_is_planned_by_formula(fields):
    with pytest.raises(UntraceableError):
        request_of(SETUP.changed(**fields), CONFIG, LORA)


def test_the_least_card_is_between_allocated_and_reserved(starts):
    """A card with less than is reserved is enough where what is free can be given back, and too small below that."""
    plans, _ = plans_of(SETUP.changed(checkpointing=1))
    wide, _ = retraced(plans, budget(80), Tracer(CONFIG, LORA))
    gpu = wide.plans[0].gpu
    small = gpu.allocated / GIB * 0.99 + 0.9
    again, _ = retraced(
        plans_of(SETUP.changed(checkpointing=1), gib=small)[0], budget(small), Tracer(CONFIG, LORA)
    )
    assert again.plans[0].verdict == OUT
    large = gpu.reserved / GIB * 1.1 + 0.9
    again, _ = retraced(
        plans_of(SETUP.changed(checkpointing=1), gib=large)[0], budget(large), Tracer(CONFIG, LORA)
    )
    assert again.plans[0].verdict == FITS


def test_holes_are_named_with_what_gives_them_back(starts):
    """On a card that would do without the holes."""
    setup = SETUP.changed(checkpointing=1)
    wide, _ = retraced(*plans_of(setup), Tracer(CONFIG, LORA))
    gpu = wide.plans[0].gpu
    assert gpu.traced is not None
    if gpu.traced.capacity < 1.06 * gpu.allocated:
        pytest.skip("this step leaves no holes")
    tight = (gpu.traced.capacity * 0.98) / GIB + 0.9
    plans, room = plans_of(setup, gib=tight)
    _, notes = retraced(plans, room, Tracer(CONFIG, LORA))
    assert any("holes" in note for note in notes)


def test_lengths_are_drawn_from_the_file():
    percentiles = [10 * (number + 1) for number in range(101)]
    batches = drawn_lengths(percentiles, 4, 1010)
    assert batches == drawn_lengths(percentiles, 4, 1010)
    assert (4, 1010) in batches
    assert len(set(batches)) > 5
    assert all(rows == 4 and 10 <= tokens <= 1010 for rows, tokens in batches)


def test_a_config_is_made_of_a_shape():
    shape = from_config(CONFIG, "config.json")
    assert from_config(config_of(shape) or {}, "config.json") == shape
    assert config_of(shape, "gpt2") is None
