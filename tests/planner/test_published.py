"""The planner against published measurements (bench/published), and against the estimators that people use today."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

from published import peers, reading, scoring, tracing, words

from dsrun.planner import shapes
from dsrun.planner.gpu_memory import gpu_memory
from dsrun.planner.setup import Setup
from dsrun.planner.trace.request import UntraceableError, request_of

FULL, ALL_FULL, LORA, ALL_LORA, ON_16_BITS, QLORA = scoring.GROUPS.values()
CASES = reading.load()
LLAMA_7B = 6_738_415_616
CASE = {
    "id": "x",
    "model": "llama-7b",
    "params": LLAMA_7B,
    "strategy": "zero2",
    "gpus": 8,
    "precision": "bf16",
}


@pytest.fixture(scope="module")
def rows():
    return [scoring.predict(case) for case in CASES]


def chosen(rows, belongs):
    return [row for row in rows if belongs(row)]


def told(rows, what):
    """Text of a failure: the rows that are furthest off."""
    return "\n".join([what, *scoring.worst(rows)])


def test_every_case_is_predicted(rows):
    assert [row.case["id"] for row in rows if not row.said] == []


def test_there_are_cases():
    assert len(CASES) >= 256
    assert len({case["id"] for case in CASES}) == len(CASES)
    assert all(case["source"] for case in CASES)


@pytest.mark.parametrize(
    ("belongs", "least", "median", "p90"),
    [
        pytest.param(FULL, 17, 0.03, 0.12, id="full fine-tuning, fully specified"),
        pytest.param(ALL_FULL, 31, 0.06, 0.30, id="full fine-tuning"),
        pytest.param(LORA, 87, 0.06, 0.20, id="LoRA, fully specified"),
        pytest.param(ON_16_BITS, 75, 0.08, 0.20, id="LoRA"),
        pytest.param(QLORA, 42, 0.08, 0.16, id="QLoRA"),
    ],
)
def test_errors(rows, belongs, least, median, p90):
    found = scoring.score(chosen(rows, belongs), "dsrun")
    assert found.n >= least
    worst = told(chosen(rows, belongs), f"median {found.median:.1%}, 90th percentile {found.p90:.1%}")
    assert found.median <= median, worst
    assert found.p90 <= p90, worst


def test_cases_that_were_collected_later():
    """No constant was chosen with these: they are held to less."""
    later = [scoring.predict(case) for case in reading.load(reading.LATER)]
    assert len(later) >= 70 and not {row.case["id"] for row in later} & {case["id"] for case in CASES}
    assert [row.case["id"] for row in later if not row.said] == []
    assert scoring.score(chosen(later, ALL_FULL), "dsrun").median <= 0.10, told(later, "full")
    assert scoring.score(chosen(later, ON_16_BITS), "dsrun").median <= 0.08, told(later, "LoRA")
    right, asked = scoring.verdicts(later, "dsrun")
    assert asked >= 70 and right / asked >= 0.92
    assert scoring.paces(later).median <= 1.5


def test_mixtures_of_experts():
    """Mostly runs that died, or that fitted: the sources give few numbers."""
    cases = reading.load(reading.MIXTURES)
    rows = {case["id"]: scoring.predict(case) for case in cases}
    assert len(rows) == len(cases) >= 10
    divided = [name for name, row in rows.items() if not row.said]
    assert divided == ["pr8064-zero1-tp2-ep8"]
    assert "divided over ranks" in rows[divided[0]].notes[0]
    wrong = [name for name, row in rows.items() if row.verdict("dsrun") is False]
    assert wrong == ["qwen3vl1601-zero2"], "82.6 GiB of 80: its rows' length is a guess"
    # Of these, 30 GiB are experts that autograd keeps gathered.
    assert rows["pr8064-zero3"].error("dsrun") == pytest.approx(0.076, abs=0.05)
    assert rows["pr8064-zero1-ep8"].error("dsrun") == pytest.approx(0.124, abs=0.05)
    recomputed = scoring.predict({**rows["pr8064-zero3"].case, "grad_ckpt": True})
    assert recomputed.said["dsrun"] < 0.55 * rows["pr8064-zero3"].said["dsrun"]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ({"id": "swift4-7b", "gpu_mem_gib": 80}, "a100-80g"),
        ({"source": "8xA800-80G", "gpu_mem_gib": 80}, "a800-80g"),
        ({"source": "2 x rtx 4090", "gpu_mem_gib": 24}, "rtx-4090"),
        ({"source": "beside 3090s", "gpu_kind": "rtx-4090", "gpu_mem_gib": 24}, "rtx-4090"),
        ({"source": "8 x V100-32G", "gpu_mem_gib": 32}, "v100-32g"),
        ({"source": "an RTX card", "gpu_mem_gib": 24}, "a10"),
    ],
)
def test_the_card_that_a_source_names(case, name):
    assert words.card(case).name == name


def test_what_fits(rows):
    right, asked = scoring.verdicts(rows, "dsrun")
    wrong = [row.case["id"] for row in rows if not row.held and row.verdict("dsrun") is False]
    assert asked >= 220
    assert right / asked >= 0.95, wrong
    seen, died = scoring.verdicts(rows, "dsrun", fits=False)
    assert died >= 19 and seen / died >= 0.85, wrong
    called, ran = scoring.verdicts(rows, "dsrun", fits=True)
    assert called / ran >= 0.96, wrong
    judged = scoring.judged(rows)
    assert sum(scoring.word(row) == "tight" for row in judged) <= 0.1 * len(judged)


def test_chances_are_what_ran(rows):
    """Among plans with a chance of about 80 %, 65 to 95 of 100 ran."""
    for low, _, count, ran in scoring.calibration(rows):
        assert low != 0.7 or 0.65 <= ran / count <= 0.95
        assert low < 0.97 or ran >= 0.98 * count


def test_seconds_and_main_memory(rows):
    paced, hosted = scoring.paces(rows), scoring.hosts(rows)
    assert paced.n >= 150 and paced.median <= 1.3 and paced.p90 <= 2
    assert hosted.n >= 5 and hosted.median <= 0.15


def test_no_source_carries_the_figures(rows):
    left = scoring.without_one_source(chosen(rows, FULL))
    assert left.median <= 0.05
    assert left.p90 <= 0.12


def test_dsrun_is_nearer_than_the_peers():
    pytest.importorskip("deepspeed")
    pytest.importorskip("accelerate")
    both = peers.load()
    rows = [scoring.predict(case, both) for case in CASES]
    for belongs in (FULL, ALL_FULL):
        tools = ("dsrun", "deepspeed", "accelerate")
        found = {tool: scoring.score(chosen(rows, belongs), tool) for tool in tools}
        assert len({score.n for score in found.values()}) == 1
        for peer in tools[1:]:
            assert found["dsrun"].median < found[peer].median / 2, found
            assert found["dsrun"].p90 < found[peer].p90 / 2, found


def test_the_peers_formulas():
    """Formulas as in their sources (stage_1_and_2.py, stage3.py, estimate.py), so that a changed one is noticed."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("accelerate")
    both, psi = peers.load(), LLAMA_7B
    shape, _ = shapes.shape("llama-7b", psi)
    largest = 11008 * 4096 if 11008 > 32000 else 32000 * 4096
    assert both.deepspeed(Setup(shape, gpus=8)) == 2 * psi + 18 * psi // 8
    assert both.deepspeed(Setup(shape, gpus=8, optimizer_device="cpu")) == 2 * psi
    assert both.deepspeed(Setup(shape, gpus=8, stage=3)) == 4 * largest + 18 * psi // 8
    assert both.deepspeed(Setup(shape, gpus=8, stage=0, engine="torch")) == 20 * psi
    assert both.deepspeed(Setup(shape, method="lora", adapters=1)) is None
    assert both.accelerate(Setup(shape, gpus=8)) == 8 * psi
    assert both.accelerate(Setup(shape, precision="fp32")) == 16 * psi
    assert both.accelerate(Setup(shape, method="lora", adapters=1)) is None


# --- reading --------------------------------------------------------------------------------------------------------


def test_missing_values_are_guessed_and_noted():
    given = reading.read({"model": "llama-7b"})
    assert given.setup.shape.parameters == shapes.matrices(given.setup.shape)
    assert {note.split(" ")[0] for note in given.notes} == {
        "parameters", "strategy", "gpus", "precision", "optimizer", "seq_len", "micro_batch", "logits",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strategy": "tensor-parallel"}, "strategy 'tensor-parallel'"),
        ({"precision": "fp8"}, "precision 'fp8'"),
        ({"optimizer": "adafactor"}, "optimizer 'adafactor'"),
        ({"offload": "tape"}, "offload 'tape'"),
        ({"model": "nobody-1b", "params": None}, "nobody-1b is not in presets/shapes"),
        ({"model": None, "params": None}, "no shape for None"),
        ({"params": "many"}, "params 'many' is not a number"),
    ],
)
def test_what_cant_be_described_is_not_scored(change, said):
    row = scoring.predict({**CASE, "metric": "smi", "measured_gpu_gib": 20, "fits": True, **change})
    assert (row.said, row.error("dsrun"), row.verdict("dsrun")) == ({}, None, None)
    assert row.notes[0].startswith("no prediction: ") and said in row.notes[0]


@pytest.mark.parametrize(
    ("change", "field", "word"),
    [
        ({"logits": "abacus"}, "logits", "abacus"),
        ({"metric": "free"}, "metric", "free"),
        ({"strategy": "zero4"}, "strategy", "zero4"),
        ({"strategy": "zero2", "offload": "optimistic"}, "offload", "optimistic"),
        ({"quant": "hqq"}, "quant", "hqq"),
        ({"grad_ckpt": "selective"}, "grad_ckpt", "selective"),
        ({"flash_attn": "perhaps"}, "flash_attn", "perhaps"),
        ({"seq_len": "8k"}, "seq_len", "8k"),
        ({"micro_batch": -1}, "micro_batch", "-1"),
        ({"gpu_kind": "abacus-80"}, "gpu_kind", "abacus-80"),
        ({"lora": True, "lora_targets": "left_proj"}, "lora_targets", "left_proj"),
        ({"micro_bacth": 4}, "field", "micro_bacth"),
        ({"added": "yesterday"}, "added", "yesterday"),
        ({"spec": "exact"}, "spec", "exact"),
    ],
)
def test_an_unknown_word_is_refused(change, field, word):
    """It is never taken for another: the row has no prediction, and is listed with the word."""
    row = scoring.predict({**CASE, "metric": "smi", "measured_gpu_gib": 20, "fits": True, **change})
    assert (row.said, row.error("dsrun"), row.verdict("dsrun"), row.smi_error()) == ({}, None, None, None)
    assert scoring.refused([row]) == [
        {"id": "x", "field": field, "word": word, "reason": str(row.refused)}
    ] and word in str(row.refused)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "nobody-7b"}, "nobody-7b is not in presets/shapes: a usual shape for its parameters"),
        ({"weather": "fair"}, "field weather is not one of a case: not read"),
    ],
)
def test_what_is_unknown_is_noted(change, said):
    row = scoring.predict({**CASE, "measured_gpu_gib": 20, **change})
    assert said in row.notes
    assert row.said["dsrun"] > 0


def test_todays_words_stay():
    """The language only grows: what it had on 2026-11-24, and a word that a stack's releases are known by."""
    known = {"hf_old", "hf", "hf_new", "swift", "bf16_nocast", "fp16_nocast", "mega", "torchtitan", "torchtune",
             "litgpt_chunk"}  # fmt: skip
    assert known <= reading.LOGIT_BYTES.keys() and set(reading.FUSED) >= {"liger", "fused"}
    assert {"smi_gib", "tok_s_gpu", "s_it", "gpu_kind", "samples_s", "added"} <= set(words.FIELDS)
    assert {"single", "ddp", "none", "fsdp", "fsdp_full_shard", "fsdp2"} <= reading.STRATEGIES.keys()
    assert reading.LOGIT_BYTES["swift"][0] == reading.LOGIT_BYTES["hf"][0]


def test_allocated_and_nvidia_smi_are_scored_apart():
    both = {**CASE, "metric": "allocated", "measured_gpu_gib": 20, "smi_gib": 30}
    row = scoring.predict(both)
    assert row.error_of("allocated", "dsrun") == row.said["dsrun"] / 20 - 1
    assert row.smi_error() == row.said_smi_gib["dsrun"] / 30 - 1
    alone = scoring.predict({**CASE, "metric": "smi", "measured_gpu_gib": 30})
    assert (alone.error_of("allocated", "dsrun"), alone.smi_error()) == (None, row.smi_error())
    found = scoring.by_class([row, alone])
    assert [found[name][0].n for name in ("full, ZeRO and FSDP, allocated", "nvidia-smi, all")] == [1, 2]


def test_a_doubtful_chance_costs_its_square():
    """Brier score: told 100 % and died costs 1, told 100 % and ran nothing."""
    case = {**CASE, "gpu_mem_gib": 8000}
    ran, died = (scoring.predict({**case, "fits": fits}) for fits in (True, False))
    assert scoring.brier([ran]) == pytest.approx(0, abs=1e-6)
    assert scoring.brier([ran, died]) == pytest.approx(0.5, abs=1e-6)


def test_the_bench_lists_what_it_refuses(tmp_path):
    """The others are scored, and the exit code is 1."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("accelerate")
    good = {**CASE, "metric": "allocated", "measured_gpu_gib": 20, "fits": True, "gpu_mem_gib": 80}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([good, {**good, "id": "y", "logits": "abacus"}]), encoding="utf-8")
    command = [sys.executable, "bench/planner.py", "--cases", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    value = json.loads(done.stdout)
    assert (done.returncode, [row["id"] for row in value["rows"]]) == (1, ["x"])
    assert value["refused"] == [
        {"id": "y", "field": "logits", "word": "abacus", "reason": value["refused"][0]["reason"]}
    ]
    assert {"error", "said_fits", "notes"} <= value["rows"][0].keys() and "dsrun" in value["rows"][0]["error"]
    assert "refused: y: logits 'abacus'" in done.stderr


def test_published_networks_can_be_traced():
    """All but those of projects with blocks of their own; of the set-ups most."""
    tracers, requests = [], []
    for case in [*CASES, *reading.load(reading.LATER)]:
        setup = reading.read(case).setup
        with contextlib.suppress(UntraceableError):
            tracer = tracing.tracer_of(case, setup)
            tracers.append(case)
            requests.append(request_of(setup, tracer.architecture, tracer.lora))
    own = [case for case in CASES if case.get("logits") in reading.OWN_CODE]
    assert len(tracers) >= len(CASES) + len(reading.load(reading.LATER)) - len(own)
    assert len(requests) >= 230


def test_a_row_by_trace(monkeypatch):
    """Its errors and verdict stand beside the formula's; a row without one says why."""
    case = {**CASE, "metric": "smi", "measured_gpu_gib": 40.0, "fits": True, "gpu_mem_gib": 80}
    formula = gpu_memory(reading.read(case).setup)
    twice = replace(formula, smi=2 * formula.smi)
    monkeypatch.setattr(tracing, "traced", lambda *_: twice)
    row = scoring.predict(case, trace=True)
    assert row.error(scoring.TRACE) == row.smi_error(scoring.TRACE) == 2 * row.error("dsrun") + 1
    assert row.verdict(scoring.TRACE) is True
    both = (scoring.by_class([row], tool)["full, nvidia-smi"] for tool in ("dsrun", scoring.TRACE))
    assert [found.n for found, _ in both] == [1, 1]
    assert scoring.brier([row], scoring.TRACE) == pytest.approx(scoring.brier([row]), abs=1e-9)

    def refuses(*_):
        raise UntraceableError("no network")

    monkeypatch.setattr(tracing, "traced", refuses)
    other = scoring.predict(case, trace=True)
    assert (other.untraced, other.error(scoring.TRACE)) == ("no network", None)
    assert scoring.by_class([other], scoring.TRACE)["full, nvidia-smi"][0].n == 0


def test_every_later_case_has_its_day():
    """And no other one has: no constant was chosen with the former."""
    assert all(scoring.Row(case, {}, {}, "", ()).unseen for case in reading.load(reading.LATER))
    assert not any(case.get("added") for case in CASES)


def test_a_doubtful_row_is_not_scored():
    case = {**CASE, "metric": "allocated", "measured_gpu_gib": 1.0, "fits": False, "gpu_mem_gib": 80}
    rows = [scoring.predict(case), scoring.predict({**case, "hold": True})]
    assert rows[0].error("dsrun") == rows[1].error("dsrun")
    assert scoring.score(rows, "dsrun").n == 1
    assert scoring.verdicts(rows, "dsrun") == (0, 1)


def test_a_row_of_the_host_says_nothing_of_the_gpu():
    row = scoring.predict({**CASE, "host_only": True, "metric": "smi", "measured_gpu_gib": 9, "fits": True})
    assert (row.measured_gib, row.verdict("dsrun")) == (None, None)


def test_strategies():
    for name, engine, stage in (
        ("zero3", "deepspeed", 3), ("ZeRO-2", "deepspeed", 2), ("zero2-offload", "deepspeed", 2),
        ("deepspeed_zero1", "deepspeed", 1), ("fsdp", "fsdp", 0), ("single", "torch", 0), ("ddp", "torch", 0),
    ):  # fmt: skip
        setup = reading.read({**CASE, "strategy": name}).setup
        assert (setup.engine, setup.stage) == (engine, stage)


def test_offload_goes_where_the_case_says():
    devices = {
        said: (setup.optimizer_device, setup.parameter_device)
        for said in ("none", "opt", "opt+param", "nvme opt", "param")
        for setup in (reading.read({**CASE, "strategy": "zero3", "offload": said}).setup,)
    }
    assert devices == {
        "none": ("gpu", "gpu"),
        "opt": ("cpu", "gpu"),
        "opt+param": ("cpu", "cpu"),
        "nvme opt": ("nvme", "gpu"),
        "param": ("gpu", "cpu"),
    }


@pytest.mark.parametrize(
    ("model", "targets", "rank", "weights"),
    [
        # PEFT prints them: Llama-7B's default, all of its matrices, and Qwen-7B's as its own script has them.
        ("llama-7b", None, 8, 4_194_304),
        ("llama-7b", "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", 8, 19_988_480),
        ("llama-7b", "all-linear", 8, 19_988_480),
        ("llama-7b", "attention,mlp", 8, 19_988_480),
        ("llama-7b", "linear", 8, 19_988_480),
        ("llama-7b", "q_proj,v_proj,lm_head", 8, 4_194_304 + 8 * (4096 + 32000)),
        ("qwen-7b", "c_attn,c_proj,w1,w2", 64, 143_130_624),
        ("chatglm2-6b", "query_key_value", 8, 1_949_696),
    ],
)
def test_loras_weights(model, targets, rank, weights):
    case = {**CASE, "model": model, "params": None, "lora": True, "lora_targets": targets, "lora_r": rank}
    assert reading.read(case).setup.adapters == weights


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", "llama-7b"),
        ("Qwen2.5-7B-Instruct", "qwen2-7b"),
        ("Qwen/Qwen-1_8B-Chat", "qwen-1.8b"),
        ("THUDM/chatglm3-6b-32k", "chatglm2-6b"),
        ("TinyLlama-1.1B", "tinyllama-1.1b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b"),
        ("nobody/knows-7b", None),
    ],
)
def test_names_of_models(name, known):
    assert shapes.find(name) == (shapes.table()[known] if known else None)


def test_shapes_hold_about_their_parameters():
    """A shape with a slip in it would not hold the weights that its cases name."""
    dense = {
        case["model"]: case["params"]
        for case in CASES
        if "note" not in (shapes.find(case["model"]) or {"note": "unknown"})
    }
    assert len(dense) >= 20
    for name, parameters in dense.items():
        shape, notes = shapes.shape(name, None)
        assert notes == ("parameters counted from the shape",)
        assert shape.parameters == pytest.approx(parameters, rel=0.05), name  # LitGPT unties some


def test_sizes_in_names_are_the_shapes():
    sizes = {
        name: float(name.rsplit("-", 1)[-1][:-1])
        for name, fields in shapes.table().items()
        if name.rsplit("-", 1)[-1][:-1].replace(".", "", 1).isdigit() and name.endswith("b")
        if not {"note", "config"} & set(fields)
    }
    assert len(sizes) > 150
    for name, size in sizes.items():
        shape, _ = shapes.shape(name, None)
        assert shape.parameters / 1e9 == pytest.approx(size, rel=0.32), name


def test_cases_are_one_to_a_line():
    lines = reading.CASES.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines[1:-1]] == CASES


def test_the_page_shows_these_predictions(rows):
    """Its figures for dsrun are those of this planner, to the digits that are shown."""
    page = (ROOT / "docs/reference/planner-accuracy.md").read_text(encoding="utf-8")
    shown = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in page.splitlines()}
    old = [
        row.case["id"]
        for row in rows
        if row.measured_gib is not None and shown[row.case["id"]][3] != f"{row.said['dsrun']:.2f}"
    ]
    assert not old, "run: python bench/planner.py --write"
