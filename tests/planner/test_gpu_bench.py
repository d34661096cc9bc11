"""bench/gpu as far as it goes without a GPU: its cases, what it counts, what it keeps at once, and the page of it.

`full` runs the three parts whole, on a CPU and in miniature.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench/gpu"
PARTS = ("works", "speed", "planned")
GIB = 2**30


@pytest.fixture(scope="module")
def part():
    """`part(name)`: a module of the bench."""
    folders = [str(BENCH), str(BENCH.parent)]
    sys.path[:0] = folders
    yield importlib.import_module
    for folder in folders:
        sys.path.remove(folder)


@pytest.fixture
def results(part, tmp_path):
    return part("common").Results("speed", tmp_path / "results", "A card, 80 GiB; torch 2", tiny=False)


def kept(results) -> list[dict]:
    (file,) = results.folder.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_case_is_kept_at_once_though_the_next_one_fails(part, results, tmp_path):
    common = part("common")

    def fails(folder, seconds):
        assert [line["case"] for line in kept(results)] == ["first"]
        raise OSError("no room")

    cases = [common.Case("first", lambda *_: {"failed": "", "seconds": 1.0}), common.Case("second", fails)]
    common.carry_out(cases, results, common.Clock(1000), tmp_path)
    assert [line["failed"] for line in kept(results)] == ["", "OSError: no room"]


def test_no_case_is_started_that_would_end_too_late(part, results, tmp_path):
    common = part("common")
    clock = common.Clock(100)
    clock.saw(101)
    common.carry_out([common.Case("late", lambda *_: pytest.fail("it ran"))], results, clock, tmp_path)
    assert kept(results)[0]["skipped"] == common.NO_TIME


def test_a_command_that_hangs_is_ended_with_all_it_started(part, tmp_path, capsys):
    ended = part("common").ended
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    assert ended([sys.executable, "-c", child], {}, tmp_path, 1.0)[0] == "out of time"
    failed, _ = ended([sys.executable, "-c", "raise SystemExit('CUDA out of memory')"], {}, tmp_path, 60.0)
    assert failed == "out of memory"
    assert ended([sys.executable, "-c", "print(5)"], {}, tmp_path, 60.0) == ("", "5\n")


def test_the_largest_rank_counts(part, tmp_path):
    (tmp_path / "state").mkdir()
    for rank, (held, seconds) in enumerate(((5, 0.5), (7, None))):
        peaks = {"gpu_allocated_bytes": held, "step_seconds": seconds}
        (tmp_path / f"state/rank-{rank}.json").write_text(json.dumps({"rank": rank, "peaks": peaks}))
    found = part("common").took(tmp_path)
    assert (found["gpu_allocated_bytes"], found["step_seconds"], found["host_peak_bytes"]) == (7, 0.5, None)


def commands(part) -> dict[str, list[str]]:
    """Case -> what it has finetune do, of all parts."""
    works, speed, planned = map(part, PARTS)
    model = speed.Model("m", Path("/m"), 10, 9, 2, 8)
    bench, rows = works.Bench(12, {}), Path("/rows.jsonl")
    ways = {**works.WAYS, "tokens": works.BY_TOKENS}
    ways |= {preset: ("--preset", preset) for preset in works.PRESETS}
    ways |= {name: ("--attention", name) for name in works.ATTENTION}
    found = {name: bench.words("bf16", *words) for name, words in ways.items()}
    found |= {run.name: run.words(model, rows, "bf16", 10) for run in speed.RUNS}
    runs = planned.combinations(list(planned.MODELS), planned.PRESETS, (1, 4))
    return found | {run.name: planned.words(run, "bf16", 6, rows) for run in runs}


def test_every_command_is_one_that_dsrun_takes(part):
    from dsrun.cli.finetune import command as finetune

    found = commands(part)
    assert len(found) > 100
    for words in found.values():
        context = finetune.make_context("finetune", words[1:])
        assert context.params["gpus"] == 1
        assert context.params["preset"] in (None, *part("planned").PRESETS)


def test_every_preset_comes_before_any_comes_twice(part):
    planned = part("planned")
    runs = list(planned.combinations(["100m"], planned.PRESETS, (1, 4)))
    assert {run.preset for run in runs[: len(planned.PRESETS)]} == set(planned.PRESETS)
    assert len({run.name for run in runs}) == len(runs) == 4 * len(planned.PRESETS)


def test_the_models_have_the_sizes_of_their_names(part):
    counts = [case.parameters for case in part("planned").MODELS.values()]
    assert [round(count / 1e6, -2) for count in counts] == [100, 500, 1500]


def test_losses_beside_the_cpus(part):
    bench = part("works").Bench(2, {1: 5.0, 2: 4.0})

    def compared(*losses, precision="fp32"):
        lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        return bench.compared(precision, {"failed": "", "metrics": lines, "notes": []})["failed"]

    assert compared(5.0, 4.00009) == "" and compared(5.0, 4.0002) == "other losses"
    assert compared(5.0, 4.009, precision="bf16") == ""
    assert "steps [1]" in compared(5.0)


def test_a_step_of_other_examples_is_asked_for_finite_losses_alone(part):
    bench = part("works").Bench(2, {1: 5.0, 2: 4.0})

    def compared(*losses):
        lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        found = {"failed": "", "metrics": lines, "notes": []}
        return bench.compared("fp32", found, same_steps=False)["failed"]

    assert compared(1.0, 2.0) == ""
    assert compared(1.0) == compared(1.0, float("nan")) == "it doesn't train"


def test_every_case_has_a_name_of_its_own(part):
    works, speed = part("works"), part("speed")
    found = [case.name for case in works.cases(works.Bench(2, {1: 5.0}), tiny=True)]
    bench = speed.Bench(speed.Model("m", Path("/m"), 10, 9, 2, 8), "fp32", 4, None)
    found += [case.name for case in (*speed.kernel_cases("cpu"), *speed.run_cases(bench, tiny=True))]
    assert len(found) > 35
    assert len(set(found)) == len(found)


def test_a_tokens_arithmetic(part):
    """6 N, and of attention what a causal row takes: 4 L W operations forward for each pair, half of the pairs."""
    model = part("speed").Model("llama-7b", Path("/m"), 6_738_415_616, 6_607_343_616, 32, 4096)
    row = 100
    assert model.flops(row) == pytest.approx(6 * model.multiplied + 3 * 4 * 32 * 4096 * row * row / 2 / row)
    bench = part("speed").Bench(model, "bf16", 10, 400e12)
    assert bench.judged(16_000, 2.0, row, {})["mfu"] == pytest.approx(8_000 * model.flops(row) / 400e12)


def test_files_hold_every_weight_once(part):
    from types import SimpleNamespace

    sizes = {f"w{number}": SimpleNamespace(numel=lambda: 600_000) for number in range(5)}
    files = list(part("speed").shards(sizes, "cpu"))
    assert [name for file in files for name in file] == list(sizes)
    assert max(map(len, files)) == 1


@pytest.mark.parametrize("name", ["sdpa-mask", "varlen", "flex"])
def test_attention_kinds_compute_the_same(part, name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    speed, tokens = part("speed"), 32
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, speed.HEAD) for heads in (speed.HEADS, speed.KV_HEADS, speed.KV_HEADS)]
    inputs = [torch.randn(shape) for shape in shapes]
    found = speed.KIND[name](tokens, "cpu")(*inputs)
    if name == "varlen":  # transformers wants heads after tokens
        found = found.transpose(1, 2)
    torch.testing.assert_close(found, speed.KIND["sdpa-mask"](tokens, "cpu")(*inputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["torch-fused", "torch-foreach"])
def test_optimizers_are_timed(part, name):
    pytest.importorskip("torch")
    found = part("speed").adam(name, "cpu")
    assert found["failed"] == "" and found["seconds"] > 0


def line(case: str, **fields) -> dict:
    name, _, case = case.partition("/")
    about = {
        "part": name,
        "case": case,
        "day": "2027-01-02",
        "where": "NVIDIA X, 80 GiB",
        "tiny": False,
        "failed": "",
    }
    return {**about, **fields}


def test_the_page_says_which_card_and_when_or_not_yet(part):
    page = part("page")
    assert page.text([]).count(page.NOT_YET) == len(page.ITEMS)
    assert page.text([line("works/ddp", tiny=True), line("works/ddp", skipped="no time left")]) == page.text(
        []
    )
    lines = [
        line("works/zero2", failed="exit 1"),
        line("works/zero2"),
        line("works/zero3", failed="other losses"),
    ]
    (row,) = [text for text in page.text(lines).splitlines() if text.startswith("| every preset")]
    assert "NVIDIA X, 2027-01-02: 1 of 2 cases; failed: zero3" in row


def test_the_page_has_the_figures(part):
    page = part("page")
    run = line("speed/7b-4k", tokens_per_second=9000.0, mfu=0.412, gpu_allocated_bytes=100 * GIB)
    plan = line(
        "planned/100m-ddp-1",
        off=0.1,
        planned_allocated_bytes=11 * GIB,
        gpu_allocated_bytes=10 * GIB,
        step_seconds=0.5,
    )
    text = page.text([run, plan, line("speed/adam-torch-fused", seconds=0.002)])
    assert "| 7b-4k | 9,000 | 41.2% | 100.00 |" in text
    assert "| 100m-ddp-1 | 11.00 | 10.00 | **+10.0%** |  | 0.500 |" in text
    assert "| adam-torch-fused | 2.00 |" in text


def test_the_page_is_that_of_the_results(part):
    page = part("page")
    assert page.PAGE.read_text(encoding="utf-8") == page.text(part("common").stored())


def test_the_shell_scripts_say_what_they_are():
    for name in ("run.sh", "make_wheels.sh"):
        script = BENCH / name
        subprocess.run(["bash", "-n", str(script)], check=True)
        told = subprocess.run([str(script), "--help"], capture_output=True, text=True, check=True)
        assert f"bench/gpu/{name}" in told.stdout
    assert subprocess.run([str(BENCH / "run.sh")], capture_output=True, check=False).returncode == 2


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", PARTS)
def test_a_part_runs_whole_in_miniature(name, environ, tmp_path):
    argv = [str(BENCH / "run.sh"), name, "--tiny", "--output", str(tmp_path), "--budget", "3000"]
    env = {**environ, "PYTHON": sys.executable, "WHEELS": str(tmp_path / "none")}
    done = subprocess.run(argv, env=env, text=True, capture_output=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert len(lines) > 7 and {line["failed"] for line in lines} == {""}, [
        line for line in lines if line["failed"]
    ]
    assert all(line["tiny"] for line in lines)
