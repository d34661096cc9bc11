"""bench/gpu as far as it goes without a GPU: its cases, what it counts, what it keeps at once, and the page of it.

`full` runs the three parts whole, on a CPU and in miniature.
"""

from __future__ import annotations

import ast
import configparser
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsrun.catalog import read_toml

BENCH = Path(__file__).resolve().parents[2] / "bench/gpu"
PARTS = ("works", "speed", "planned", "many")
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
    late = common.Case("late", lambda *_: pytest.fail("it ran"), expected=101)
    common.carry_out(
        [late, common.Case("short", lambda *_: {}, expected=50)], results, common.Clock(100), tmp_path
    )
    assert [line.get("skipped") for line in kept(results)] == [common.NO_TIME, None]


def test_a_case_whose_package_is_not_there_is_left_out(part, results, tmp_path):
    common = part("common")
    case = common.Case("attention-flash", lambda *_: pytest.fail("it ran"), lacks="flash-attn")
    common.carry_out([case], results, common.Clock(100), tmp_path)
    assert kept(results)[0]["failed"] == ""
    assert kept(results)[0]["skipped"] == "flash-attn is not installed"


def test_kernels_share_a_process_which_is_another_one_after_an_error(part):
    child = part("common").Child()
    try:
        first = child(os.getpid)
        assert child(os.getpid) == first != os.getpid()
        with pytest.raises(ValueError, match="invalid literal"):
            child(int, "x")
        assert child(os.getpid) != first
    finally:
        child.end()


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
    works, speed, planned, many = map(part, PARTS)
    model = speed.Model("m", Path("/m"), 10, 9, 2, 8)
    bench, rows = works.Bench(12, {}), Path("/rows.jsonl")
    ways = {**works.WAYS, "tokens": works.BY_TOKENS}
    ways |= {preset: ("--preset", preset) for preset in works.PRESETS}
    ways |= {name: ("--attention", name) for name in works.ATTENTION}
    found = {name: bench.words("bf16", *words) for name, words in ways.items()}
    found |= {run.name: run.words(model, rows, "bf16", 10) for run in (*speed.RUNS, *many.RUNS)}
    runs = planned.combinations(list(planned.MODELS), planned.PRESETS, (1, 4))
    return found | {run.name: planned.words(run, "bf16", 6, rows) for run in runs}


def test_every_command_is_one_that_dsrun_takes(part):
    from dsrun import catalog
    from dsrun.cli.finetune import command as finetune

    found = commands(part)
    assert len(found) > 100
    for words in found.values():
        context = finetune.make_context("finetune", words[1:])
        assert context.params["gpus"] == 1
        assert context.params["preset"] in (None, *catalog.files("presets"))


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
    bench = speed.Bench(None, "fp32", 4, None)
    found += [case.name for case in (*speed.kernel_cases("cpu", None), *speed.run_cases(bench, tiny=True))]
    found += [case.name for case in part("many").cases(part("many").Bench(bench, 2), "cpu")]
    assert len(found) > 35
    assert len(set(found)) == len(found)


def test_a_tokens_arithmetic(part):
    """6 N, and of attention what a causal row takes: 4 L W operations forward for each pair, half of the pairs."""
    model = part("speed").Model("llama-7b", Path("/m"), 6_738_415_616, 6_607_343_616, 32, 4096)
    row = 100
    assert model.flops(row) == pytest.approx(6 * model.multiplied + 3 * 4 * 32 * 4096 * row * row / 2 / row)
    frozen = model.flops(row) - model.flops(
        row, frozen=True
    )  # LoRA's backward has one product less with each weight
    assert frozen == pytest.approx(2 * model.multiplied)
    bench = part("speed").Bench(None, "bf16", 10, 400e12)
    assert bench.judged(model.flops(row), 16_000, 2.0, {})["mfu"] == pytest.approx(
        8_000 * model.flops(row) / 400e12
    )


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
    run = line("speed/8b-widths-4k", tokens_per_second=9000.0, mfu=0.412, gpu_allocated_bytes=100 * GIB)
    plan = line(
        "planned/100m-ddp-1",
        off=0.1,
        planned_allocated_bytes=11 * GIB,
        gpu_allocated_bytes=10 * GIB,
        step_seconds=0.5,
    )
    text = page.text([run, plan, line("speed/adam-torch-fused", seconds=0.002)])
    assert "| 8b-widths-4k | 9,000 | 41.2% | 100.00 |" in text
    assert "| 100m-ddp-1 | 11.00 | 10.00 | **+10.0%** |  | 0.500 |" in text
    assert "| adam-torch-fused | 2.00 |" in text


def test_a_card_joins_what_ran_of_a_model_and_a_preset(part):
    page = part("page")
    about = {"model": "llama-tiny", "preset": "zero2"}
    lines = [
        line("works/zero2", **about, set_up="zero2", difference=2e-3, tolerance=1e-2, gpu_allocated_bytes=2 * GIB,
             planned_allocated_bytes=3 * GIB, step_seconds=0.5, planned_step_seconds=0.25),
        line("works/killed-and-resumed-zero2", **about, resumed=True, failed="other losses"),
        line("works/export-loads-zero2", **about, exported=True),
        line("works/zero3", model="llama-tiny", preset="zero3", difference=1e-3, tolerance=1e-2),
    ]  # fmt: skip
    cards = page.cards_of(page.newest(lines).values())
    assert set(cards) == {"llama-tiny-zero2-nvidia-x.md", "llama-tiny-zero3-nvidia-x.md"}
    _, text = cards["llama-tiny-zero2-nvidia-x.md"]
    assert "| losses against a CPU's in fp32 | zero2 | 2.0e-03 apart at most (1e-02 allowed) |" in text
    assert "2 GiB, plan 3 (+50.0%)" in text and "0.5 s, plan 0.25 (-50.0%)" in text
    assert "| model FLOPs utilisation | | not yet |" in text
    assert "| kill -9 and resume | killed-and-resumed-zero2 | **other losses** |" in text
    assert "transformers loads it" in text
    assert "(cards/llama-tiny-zero2-nvidia-x.md)" in page.text(lines)


def test_the_wheels_are_all_that_setup_cfg_asks_for():
    """names.txt is made of these lists: what dsrun needs, less what a machine for training has."""
    script = (BENCH / "make_wheels.sh").read_text(encoding="utf-8")
    lists = re.findall(r'^(?:deepspeed|own|scores|curve|with_its_own|built)="([^"]*)"', script, re.MULTILINE)
    assert len(lists) == 6
    wheels = {plain(word) for words in lists for word in words.split()}
    config = configparser.ConfigParser()
    config.read(BENCH.parents[1] / "setup.cfg", encoding="utf-8")
    asked = config["options"]["install_requires"], config["options.extras_require"]["train"]
    needed = {
        plain(row) for rows in asked for row in rows.splitlines() if row and "python_version" not in row
    }
    there = {"torch", "transformers", "accelerate", "peft", "safetensors", "pyyaml"}
    left_out = {"datasets", "hyperscan", "starlette", "uvicorn"}  # dsrun does without them
    assert needed - wheels == there | left_out
    assert {"referencing", "rpds-py", "jsonschema-specifications", "attrs"} <= wheels  # jsonschema's own


def plain(requirement: str) -> str:
    """The name that a requirement has in an index."""
    return re.split(r"[<>=;\[ ]", requirement)[0].replace("_", "-").lower()


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


class CudaPlaces(ast.NodeVisitor):
    """The functions of a module that ask for a GPU: torch.cuda, a tensor's is_cuda, or a device of that name."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.found: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node)

    def _inside(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "is_cuda" or (node.attr == "cuda" and ast.unparse(node.value) == "torch"):
            self._take()
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        parts = [part.value for part in (node.left, *node.comparators) if isinstance(part, ast.Constant)]
        if {"cuda", "cpu"} & set(map(str, parts)):
            self._take()
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        first = node.args[0] if node.args else None
        if (
            ast.unparse(node.func) == "torch.device"
            and isinstance(first, ast.Constant)
            and first.value == "cuda"
        ):
            self._take()
        self.generic_visit(node)

    def _take(self) -> None:
        # A function inside of another one is that one's.
        methods = self.names[:2] if self.names and self.names[0][:1].isupper() else self.names[:1]
        self.found.add(".".join(methods))


def test_every_place_for_a_gpu_says_what_exercises_it_without_one():
    """The table is the code's: a new place, or one that is gone, is found here."""
    places = {}
    training = BENCH.parents[1] / "dsrun/training"
    for path in sorted(training.rglob("*.py")):
        visitor = CudaPlaces()
        visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
        if visitor.found:
            places[str(path.relative_to(training))] = visitor.found
    table = read_toml(BENCH / "branches.toml")
    assert {name: set(functions) for name, functions in table.items()} == places
    for tests in (tests for functions in table.values() for tests in functions.values()):
        assert all((BENCH.parents[1] / test).exists() for test in tests)
