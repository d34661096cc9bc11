"""`dsrun plan`: what it prints, where, and what it answers to input that can't be right."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys

import pytest

from dsrun import catalog
from dsrun.cli import finetune
from dsrun.cli.planning.plan_text import components
from dsrun.cli.planning.plot import layers
from dsrun.cluster.devices import Gpu, Machine
from dsrun.jobs.assembly import plan_target
from dsrun.jobs.assembly.plan_target import target
from dsrun.jobs.assembly.planning import search, setups, subjects
from dsrun.options.commands import PlanOptions
from dsrun.options.layers import Resolved, Source
from dsrun.planner import terms
from dsrun.planner.gpu_memory import untracked_gib

ROOT = catalog.PACKAGE.parent
GIB = 2**30
HEAVY = {
    "torch", "deepspeed", "transformers", "accelerate", "datasets", "tokenizers", "sentencepiece", "numpy",
    "matplotlib", "pyarrow", "jinja2", "jsonschema",
}  # fmt: skip
TWO_V100S = ("plan", "chatglm2-6b", "--gpu", "v100-32g", "--gpus", 2, "--host-memory", "256GiB")
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008, "vocab_size": 32000,
}  # fmt: skip


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """The folder that commands run in: a hostile name, nothing of the user's, a CPU machine."""
    folder = tmp_path / "a user's 工作"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("config", "cache", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


def rows_of(out: str) -> dict[str, list[str]]:
    """Preset -> its cells from the verdict on, in the table's order."""
    lines = out.splitlines()
    start = next(number for number, line in enumerate(lines) if set(line) == {"─", " "})
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines[start + 1 :]]
    found = {}
    for row in cells:
        if row == [""]:
            break
        found[row[0].removesuffix(" +ckpt")] = row[2:]
    return found


# What it prints


def test_two_v100s_and_chatglm2(dsrun, untouched):
    said = dsrun(*TWO_V100S, "--wide")
    assert said.code == 0
    assert said.out.startswith(
        "chatglm2-6b: 6.244e9 parameters, 28 layers of 4096\non 2 x v100-32g, 31.7 GiB each"
    )
    assert "all weights, fp16, adamw; rows of 128 tokens, 16 a step on 2 ranks" in said.out
    rows = rows_of(said.out)
    verdicts = {  # the best first; other presets may be between them
        "zero2-offload": "fits", "zero3-offload": "fits", "zero3": "out of memory", "zero2": "out of memory",
        "zero1": "out of memory", "ddp": "out of memory",
    }  # fmt: skip
    found = {bare: row[0] for name, row in rows.items() if (bare := name.removesuffix(" +ckpt")) in verdicts}
    assert list(found.items()) == list(verdicts.items())
    assert rows["zero2-offload"][7] == "1.00"
    # A model of 6.2e9 under DDP: 2 + 2 + 4 + 8 bytes a parameter, and Adam's temporaries.
    assert float(rows["ddp"][3]) > 16 * 6.24
    assert "Nothing fits" not in said.out


def test_notes_are_no_part_of_the_result(dsrun):
    said = dsrun(*TWO_V100S)
    notes = said.err.splitlines()
    assert all(line.startswith("note: ") for line in notes)
    assert len(notes) == len(set(notes)) >= 3
    assert not any(note.removeprefix("note: ") in said.out for note in notes)
    assert any("zero3-nvme is left out: no NVMe disk is named" in note for note in notes)
    assert any("Rows of 64 + 64 tokens" in note for note in notes)


def test_the_table_is_not_folded_in_a_pipe(dsrun, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    said = dsrun(*TWO_V100S, "--wide")
    assert all(row[-1].startswith(("GPU: ", "host: ")) for row in rows_of(said.out).values())


def test_the_usual_table_fits_80_columns(dsrun):
    said = dsrun("plan", "llama-7b", "--gpu", "v100-32g", "--gpus", 2, "--nvme", "2TB")
    lines = [
        line for line in said.out.splitlines() if not line.startswith("With finetune")
    ]  # to be copied: whole
    assert max(map(len, lines)) <= 80
    assert "checkpoint" in dsrun("plan", "llama-7b", "--gpu", "v100-32g", "--wide").out


def test_a_presets_name_is_no_markup(dsrun, lab):
    source = catalog.files("presets")["zero2"].read_text(encoding="utf-8")
    (lab / "presets" / "[red]ours.toml").write_text(source, encoding="utf-8")
    assert "[red]ours" in rows_of(dsrun(*TWO_V100S).out)


def test_nvme_has_a_column_where_there_is_a_disk(dsrun):
    assert "NVMe" not in dsrun(*TWO_V100S, "--wide").out.partition("──")[0]
    said = dsrun(*TWO_V100S, "--nvme", "2TB", "--wide")
    assert "NVMe" in said.out
    rows = rows_of(said.out)
    assert float(rows["zero3-nvme"][7]) > 0
    assert rows["zero2"][7] == "-"


def test_on_cpus_there_is_no_gpu_column(dsrun):
    said = dsrun("plan", "llama-tiny", "--host-memory", "16GiB", "--wide", "--gpus", 1)
    assert "GPU  " not in said.out
    assert "CPU rank" in said.out
    assert all(row[0] == "fits" for row in rows_of(said.out).values())


def test_advice_where_nothing_fits(dsrun):
    said = dsrun("plan", "llama-2-70b", "--gpu", "v100-32g", "--gpus", 2, "--host-memory", "64GiB")
    assert said.code == 1
    steps = re.findall(r"^  (\d)\. (.+): (.+); the price: (.+)$", said.out, re.MULTILINE)
    assert [step[0] for step in steps] == [str(number) for number in range(1, len(steps) + 1)] != []
    assert re.search(r"^  Then: \S+, (fits|tight), ", said.out, re.MULTILINE)


def test_where_no_change_helps(dsrun):
    said = dsrun("plan", "llama-2-70b", "--gpu-memory", "1GiB", "--host-memory", "2GiB")
    assert "no list of up to four changes makes it fit" in said.out


def test_one_model_in_numbers(dsrun):
    said = dsrun(
        "plan", "--params", "6.2e9", "--hidden", 4096, "--layers", 28, "--gpu-memory", "24GiB", "--gpus", 4
    )
    assert said.code == 0
    assert said.out.startswith("6.2e9 parameters, 28 layers of 4096\non 4 x GPU, 24.0 GiB each\n")
    assert "Assumed for the model: vocab 32000" in said.err
    assert "Rows of 2048 tokens are assumed" in said.err
    assert "Speed is that of a100-80g" in said.err


def test_one_rank_is_singular(dsrun):
    assert "on 1 rank;" in dsrun("plan", "llama-7b", "--gpu", "t4", "--gpus", 1).out


def test_only_the_presets_that_are_named(dsrun):
    said = dsrun(*TWO_V100S, "--preset", "zero3", "--preset", "ddp")
    assert {name.removesuffix(" +ckpt") for name in rows_of(said.out)} == {"zero3", "ddp"}
    assert "left out" not in said.err


def test_a_folder_with_a_hostile_name(dsrun, work):
    folder = work / 'it\'s a "模型"'
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    said = dsrun("plan", folder.name, "--gpu", "a100-80g", "--json")
    assert json.loads(said.out)["model"]["name"] == folder.name


def test_chatglms_own_config(dsrun, work):
    config = {
        "model_type": "chatglm", "num_layers": 28, "hidden_size": 4096, "ffn_hidden_size": 13696,
        "num_attention_heads": 32, "multi_query_group_num": 2, "kv_channels": 128, "padded_vocab_size": 65024,
        "seq_length": 32768, "layernorm_epsilon": 1e-5,
    }  # fmt: skip
    (work / "config.json").write_text(json.dumps(config), encoding="utf-8")
    length = ("--seq-len", 128)
    said = dsrun("plan", "config.json", "--gpu", "v100-32g", "--gpus", 2, "--host-memory", "256GiB", *length)
    assert [row[0] for row in rows_of(said.out).values()] == [
        row[0] for row in rows_of(dsrun(*TWO_V100S, *length).out).values()
    ]


# --json


def values(value, path="$"):
    """Every leaf with its path."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from values(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from values(inner, f"{path}[{number}]")
    else:
        yield path, value


KEYS = {
    "$": {"version", "model", "place", "trainer", "plans", "skipped", "advice", "usual", "cost", "notes",
          "knobs", "lengths", "timeline", "cards"},
    "plan": {
        "preset", "verdict", "chance", "used", "reason", "largest_micro_batch", "gpu", "host", "nvme_bytes",
        "checkpoint_bytes", "speed", "setup",
    },
    "gpu": {
        "by", "needed_bytes", "allocated_bytes", "formula_allocated_bytes", "reserved_bytes", "nvidia_smi_bytes",
        "peak_at", "peaks", "at_peak", "terms",
    },
    "host": {"peak_bytes", "peaks", "terms"},
    "speed": {"seconds_per_step", "tokens_per_second", "terms"},
    "advice": {"steps", "preset", "verdict", "nodes"},
    "step": {"text", "costs", "saves_bytes", "slower"},
}  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [
        TWO_V100S[1:], ("llama-2-70b", "--gpu", "t4"), ("llama-tiny", "--host-memory", "16GiB"),
        ("llama-7b", "--gpu", "h200", "--method", "qlora", "--nvme", "1TB", "--components"),
        ("--params", "7B", "--gpu-memory", "1GiB", "--gpus", 64, "--nodes", 9, "--network", "0.001"),
    ],
)  # fmt: skip
def test_json(dsrun, args):
    said = dsrun("plan", *args, "--json")
    result = json.loads(said.out, parse_constant=pytest.fail)
    nothing = result["plans"][0]["verdict"] == "out of memory"
    assert (said.code, said.err) == (int(nothing), "")
    assert set(result) == KEYS["$"]
    assert result["plans"]
    for plan in result["plans"]:
        assert set(plan) == KEYS["plan"]
        for part in ("gpu", "host", "speed"):
            assert set(plan[part]) == KEYS[part]
        assert plan["setup"]["seq_len"] > 0
        assert "shape" not in plan["setup"]
        assert plan["gpu"]["allocated_bytes"] == max(plan["gpu"]["peaks"].values())
        assert plan["host"]["peak_bytes"] == max(plan["host"]["peaks"].values())
        assert sum(plan["speed"]["terms"].values()) == pytest.approx(
            plan["speed"]["seconds_per_step"], rel=0.01
        )
    for path, value in values(result):
        if isinstance(value, float):
            assert math.isfinite(value), path
        if isinstance(value, (int, float)) and "saves_bytes" not in path:
            assert value >= 0, path
    assert nothing or result["advice"] is None
    if result["advice"]:
        assert set(result["advice"]) == KEYS["advice"]
        assert all(set(step) == KEYS["step"] for step in result["advice"]["steps"])


def test_json_and_the_table_say_the_same(dsrun):
    plans = json.loads(dsrun(*TWO_V100S, "--json").out)["plans"]
    rows = rows_of(dsrun(*TWO_V100S, "--wide").out)
    assert [plan["preset"] for plan in plans] == [name.removesuffix(" +ckpt") for name in rows]
    for plan, row in zip(plans, rows.values(), strict=True):
        assert row[0] == plan["verdict"]
        assert row[1] == f"{100 * plan['chance']:.0f} %"
        assert float(row[2]) == pytest.approx(plan["gpu"]["needed_bytes"] / GIB, rel=0.01)
        assert float(row[3]) == pytest.approx(plan["gpu"]["allocated_bytes"] / GIB, rel=0.01)
        assert float(row[5]) == pytest.approx(plan["host"]["peak_bytes"] / GIB, rel=0.01)
        assert float(row[6]) == pytest.approx(plan["checkpoint_bytes"] / GIB, rel=0.01)
        assert int(row[9]) == plan["largest_micro_batch"]
        assert row[10] == plan["reason"]
        fits = plan["verdict"] != "out of memory"
        assert fits == (plan["largest_micro_batch"] >= plan["setup"]["micro_batch"])
        assert fits == (plan["used"] <= 1)


def test_json_is_stable(dsrun):
    assert dsrun(*TWO_V100S, "--json") == dsrun(*TWO_V100S, "--json")


# --components


EVERY_SORT = [
    ("chatglm2-6b", {"gpu": "v100-32g", "gpus": 2, "nvme": "2TB"}, {"grad_accum": 4}),
    ("llama-7b", {"gpu": "a100-80g", "gpus": 8, "nodes": 2, "nvme": "2TB"}, {"activation_checkpointing": "full"}),
    ("llama-7b", {"gpu": "a100-80g"}, {"method": "lora", "attention": "eager", "precision": "fp32"}),
    ("llama-7b", {"gpu": "a100-80g"}, {"method": "qlora", "attention": "eager"}),
    ("llama-tiny", {"cpu": 1}, {}),
    ("llama-7b", {"cpu": 2}, {"grad_accum": 2, "activation_checkpointing": "selective"}),
]  # fmt: skip


def plans_of(model, where, given):
    """Every preset's plan and the room that it is for."""
    machine = Machine("cpu", (), where.get("cpu", 1), "a machine of paper", 64 * GIB)
    said = {**given, **{name: value for name, value in where.items() if name != "cpu"}}
    what, asked = subjects.subject(model), Resolved.built_in(PlanOptions).filled(Source.COMMAND_LINE, said)
    options = subjects.with_model(asked, what).options
    found = target(options, machine)
    precision = given.get("precision", "fp32" if "cpu" in where else "bf16")
    base = setups.base_setup(what.shape, found.room, options, precision, flash=options.attention != "eager")
    result = search.answer(base, found, setups.all_presets())
    return result.plans, found.room


@pytest.mark.parametrize("case", range(len(EVERY_SORT)))
def test_every_term_has_its_formula_and_its_source(capsys, case):
    plans, room = plans_of(*EVERY_SORT[case])
    for plan in plans:
        components(plan, room)
        out = capsys.readouterr().out
        parts = [plan.host.terms, plan.speed.terms, *([plan.gpu.terms] if room.accelerator == "cuda" else [])]
        wanted = sorted(name for part in parts for name, value in part.items() if value)
        lines = re.findall(r"^.{10} *\d+\.\d{3}  (\S+)(.*)$", out, re.MULTILINE)
        assert sorted(name for name, _ in lines) == wanted, plan.preset
        known = {*terms.GPU, *terms.HOST, *terms.SPEED}
        for name, text in lines:
            assert name not in known or re.fullmatch(r" +\S.*: \S.* \(\S.*\)", text), name


def test_the_terms_shown_are_the_first_plans(dsrun):
    said = dsrun(*TWO_V100S, "--components")
    plan = json.loads(dsrun(*TWO_V100S, "--json").out)["plans"][0]
    text = said.out.partition(f"\n{plan['preset']}: every term\n")[2]
    assert text
    for part, unit in ((plan["gpu"], GIB), (plan["host"], GIB), (plan["speed"], 1)):
        for name, value in part["terms"].items():
            line = re.search(rf"^.{{10}} *{value / unit:.3f}  {name} +\S", text, re.MULTILINE)
            assert bool(line) == bool(value), name
    assert terms.GPU["weights"].formula in text
    assert f"at the peak ({terms.MOMENTS[plan['gpu']['peak_at']]})" in text


# --plot


@pytest.mark.parametrize("name", ["a b 图.png", "LOUD.PDF"])
def test_a_picture(dsrun, work, name):
    pytest.importorskip("matplotlib")
    said = dsrun(*TWO_V100S, "--plot", name)
    assert said.code == 0
    content = (work / name).read_bytes()
    start = {"png": b"\x89PNG", "pdf": b"%PDF"}[name[-3:].lower()]
    assert content.startswith(start)
    assert len(content) > 3000
    assert sorted(path.name for path in work.iterdir()) == [name]
    assert rows_of(said.out)


def test_bars_stand_one_after_another(dsrun, work, monkeypatch):
    axes = pytest.importorskip("matplotlib.axes").Axes
    ends = {}
    real = axes.barh

    def barh(self, names, sizes, left=None, **options):
        for name, size, start in zip(names, sizes, left or (), strict=False):  # the host's bars have one part
            assert start == pytest.approx(ends.get(name, 0.0))
            ends[name] = start + size
        return real(self, names, sizes, left=left, **options)

    monkeypatch.setattr(axes, "barh", barh)
    plans = json.loads(dsrun(*TWO_V100S, "--plot", "x.png", "--json").out)["plans"]
    for plan in plans:
        name = next(name for name in ends if name.startswith(f"{plan['preset']} with"))
        assert ends[name] == pytest.approx(plan["gpu"]["allocated_bytes"] / GIB + untracked_gib(2))
    assert (work / "x.png").stat().st_size


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            TWO_V100S,
            [
                "GiB on each GPU at the peak",
                "there is 31.7 GiB",
                "zero1",
                "zero2-offload",
                "zero3",
                "ddp",
                "CUDA and NCCL",
            ],
        ),
        (
            ("plan", "llama-tiny", "--host-memory", "16GiB"),
            ["GiB of host memory", "there is 16.0 GiB"],
        ),
    ],
)
def test_what_a_picture_shows(dsrun, work, monkeypatch, args, words):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    assert dsrun(*args, "--plot", "x.svg").code == 0
    text = (work / "x.svg").read_text(encoding="utf-8").replace("&apos;", "'")
    assert all(word in text for word in words)


@pytest.mark.parametrize("case", range(len(EVERY_SORT)))
def test_the_layers_add_up_to_the_peak(case):
    plans, room = plans_of(*EVERY_SORT[case])
    found = layers(plans, room)
    for number, plan in enumerate(plans):
        sizes = [layer[number] for layer in found.values()]
        assert all(size >= -1e-9 for size in sizes), plan.preset
        peak = (
            plan.host.peak / GIB
            if room.accelerator == "cpu"
            else plan.gpu.allocated / GIB + untracked_gib(room.ranks)
        )
        assert sum(sizes) == pytest.approx(peak), plan.preset


# What is wrong


BAD = {
    "no model": ((), ["no model is named", "--params"]),
    "a typo": (("lama-tiny",), ["'lama-tiny'", "'llama-tiny'"]),
    "no such folder": (("./none",), ["./none: no such folder or file"]),
    "an empty name": (("",), ["unknown model ''"]),
    "a folder without a model": (("empty",), ["empty: holds no config.json"]),
    "broken JSON": (("broken.json",), ["broken.json", "not JSON"]),
    "a mixture of experts": (("mixtral.json",), ["mixtral.json"]),
    "a model of images": (("images.json",), ["model of images"]),
    "missing fields": (("half.json",), ["half.json: lacks num_hidden_layers"]),
    "a GGUF file": (("x.gguf",), ["x.gguf", "--params"]),
    "two models": (("llama-7b", "--params", "7e9"), ["llama-7b says what --params would say"]),
    "a size without a unit": (("llama-7b", "--gpu-memory", "24"), ["--gpu-memory", "24GiB", "24GB"]),
    "a doubtful unit": (("llama-7b", "--gpu-memory", "24G"), ["--gpu-memory", "two things"]),
    "no size": (("llama-7b", "--host-memory", ""), ["--host-memory", "''"]),
    "no memory": (("llama-7b", "--nvme", "0TB"), ["--nvme", "above 0"]),
    "an unknown GPU": (("llama-7b", "--gpu", "v100-32"), ["'v100-32'", "There are: v100-32g, v100-32g-pcie"]),
    "too many ranks": (("llama-7b", "--gpus", 999), ["--gpus: can't be 999", "--gpu v100-32g"]),
    "an unknown preset": (("llama-7b", "--gpu", "t4", "--preset", "zero9"), ["'zero9'", "dsrun preset"]),
    "one unknown of two": (("llama-7b", "--gpu", "t4", "--preset", "zero2", "--preset", "zero9"), ["'zero9'"]),
    "NVMe without a disk": (
        ("llama-7b", "--gpu", "t4", "--preset", "zero3-nvme"),
        ["--preset zero3-nvme", "--nvme 2TB"],
    ),
    "numbers that disagree": (("--params", "7e9", "--layers", 400), ["--params", "don't agree"]),
    "heads that don't divide": (("--params", "7e9", "--heads", 32, "--kv-heads", 5), ["--kv-heads"]),
    "no training file": (("llama-7b", "--gpu", "t4", "--train-file", "none.jsonl"), ["none.jsonl: no such file"]),
    "no tokenizer": (
        ("llama-7b", "--gpu", "t4", "--train-file", "rows.jsonl"),
        ["tokenizer of llama-7b", "--model-path"],
    ),
    "no tokenizer there": (
        ("llama-7b", "--gpu", "t4", "--train-file", "rows.jsonl", "--model-path", "empty"),
        ["empty: holds no tokenizer"],
    ),
    "no such column": (
        ("llama-7b", "--gpu", "t4", "--train-file", "rows.jsonl", "--prompt-column", "x", "--model-path", "empty"),
        ["no column 'x'", "--prompt-column"],
    ),
    "no kind of picture": (("llama-7b", "--gpu", "t4", "--plot", "x.jpg"), ["x.jpg", ".png"]),
    "a picture without a name": (("llama-7b", "--gpu", "t4", "--plot", "empty"), ["--plot empty"]),
    "a picture in no folder": (("llama-7b", "--gpu", "t4", "--plot", "no/x.png"), ["no/x.png", "No such file"]),
    "a picture over a folder": (("llama-7b", "--gpu", "t4", "--plot", "dir.png"), ["dir.png: is a folder"]),
    "no run": (("--calibrate", "none"), ["none/job.json"]),
}  # fmt: skip


@pytest.fixture
def files(work):
    texts = {
        "broken.json": '{"model_type":',
        "mixtral.json": json.dumps({**LLAMA, "model_type": "mixtral", "num_local_experts": 8}),
        "images.json": json.dumps({"model_type": "qwen2_vl", "vision_config": {}}),
        "half.json": json.dumps(
            {name: value for name, value in LLAMA.items() if name != "num_hidden_layers"}
        ),
        "rows.jsonl": '{"content": "a", "summary": "b"}\n',
    }
    for name, text in texts.items():
        (work / name).write_text(text, encoding="utf-8")
    for name in ("empty", "dir.png"):
        (work / name).mkdir()


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_message(files, untouched, dsrun, case):
    args, words = BAD[case]
    said = dsrun("plan", *args)
    assert (said.code, said.out) == (1, ""), said.err
    assert all(word in said.err for word in words), said.err
    assert len(re.findall(r"^dsrun: ", said.err, re.MULTILINE)) == 1, said.err


def test_everything_wrong_with_the_place_at_once(dsrun, untouched):
    said = dsrun("plan", "llama-7b", "--gpu", "nope", "--host-memory", "3", "--nvme", "x")
    assert (said.code, said.out, said.err.count("dsrun: ")) == (1, "", 3)


MISUSED = {
    "no GPUs": (("llama-7b", "--gpus", 0), "--gpus"),
    "two names": (("llama-7b", "llama-13b"), "one MODEL"),
    "no number": (("--params", "6,2e9"), "'6,2e9' is not a number"),
    "below zero": (("--params", "-3"), "--params"),
    "zero": (("--params", "0"), "--params"),
    "not finite": (("--params", "nan"), "--params"),
    "infinite": (("--params", "1e999"), "--params"),
    "no network": (("llama-7b", "--gpu", "t4", "--network", "0"), "--network"),
    "a network that is no number": (("llama-7b", "--gpu", "t4", "--nodes", 2, "--network", "nan"), "--network"),
    "an endless network": (("llama-7b", "--gpu", "t4", "--nodes", 2, "--network", "inf"), "--network"),
    "two lengths": (("llama-7b", "--gpu", "t4", "--seq-len", 9, "--max-source-length", 9), "--seq-len"),
    "a length and a file": (("llama-7b", "--gpu", "t4", "--seq-len", 9, "--train-file", "x.jsonl"), "--seq-len"),
    "a tokenizer without a file": (("llama-7b", "--gpu", "t4", "--model-path", "x"), "--model-path"),
    "a column without a file": (("llama-7b", "--gpu", "t4", "--prompt-column", "x"), "--prompt-column"),
    "a rank without LoRA": (("llama-7b", "--gpu", "t4", "--lora-rank", 8), "--lora-rank"),
    "LoRA in inference": (("llama-7b", "--gpu", "t4", "--for", "inference", "--method", "lora"), "--method"),
    "a picture of inference": (("llama-7b", "--gpu", "t4", "--for", "inference", "--plot", "x.png"), "--plot"),
    "terms of inference": (("llama-7b", "--gpu", "t4", "--for", "inference", "--components"), "--components"),
    "presets of inference": (("llama-7b", "--gpu", "t4", "--for", "inference", "--preset", "ddp"), "--preset"),
    "no flash attention in inference": (("llama-7b", "--gpu", "t4", "--for", "inference", "--no-flash"), "--no-flash"),
    "nothing to learn from": (("--calibrate",), "run folders"),
    "a place to calibrate": (("x", "--calibrate", "--gpu", "t4"), "--gpu"),
    "inference to calibrate": (("x", "--calibrate", "--for", "inference"), "--for"),
    "an unknown option": (("--nonsense",), "--nonsense"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSED)
def test_wrong_usage(dsrun, untouched, case):
    args, words = MISUSED[case]
    said = dsrun("plan", *args)
    assert (said.code, said.out) == (2, ""), said.err
    assert words in said.err
    assert "Usage" in said.err


# Rows that are measured


@pytest.fixture
def tokenizer(work):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (work / "tok").mkdir()
    made.save(str(work / "tok" / "tokenizer.json"))
    rows = [{"content": "a " * length, "summary": "a a"} for length in (1, 5, 30)]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_finetunes_lengths_are_planned_for(dsrun, tokenizer):
    args = (
        "plan",
        "llama-7b",
        "--gpu",
        "a100-80g",
        "--train-file",
        "rows.jsonl",
        "--model-path",
        "tok",
        "--json",
    )
    result = json.loads(dsrun(*args).out)
    assert {plan["setup"]["seq_len"] for plan in result["plans"]} == {64}  # finetune's limit, in whole 64s
    (note,) = [note for note in result["notes"] if "rows.jsonl" in note]
    assert "3 examples" in note
    assert "the longest 37" in note
    assert result["cost"]["epoch_examples"] == 3
    shorter = json.loads(dsrun(*args, "--max-source-length", 20).out)
    assert shorter["plans"][0]["setup"]["seq_len"] == 20 + 64


def test_a_folders_own_tokenizer(dsrun, tokenizer, work):
    (work / "tok" / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    said = dsrun("plan", "tok", "--gpu", "a100-80g", "--train-file", "rows.jsonl", "--json")
    assert json.loads(said.out)["plans"][0]["setup"]["seq_len"] == 64


# Small changes


def test_another_split_of_a_fixed_step_is_named_where_it_is_much_faster(dsrun):
    """Four rows at once leave Llama-3-8B on 8 x 24 GB with offload alone; two and two have room under ZeRO-3."""
    one = ("plan", "llama-3-8b", "--gpu", "rtx-4090", "--gpus", 8)
    said = dsrun(*one, "--micro-batch", 4, "--grad-accum", 1)
    assert "--micro-batch 2 --grad-accum 2 zero3" in said.err
    assert "--grad-accum" not in dsrun(*one, "--global-batch", 32).err


def test_less_recomputing_is_named_where_it_is_much_faster(dsrun):
    one = ("plan", "llama-7b", "--gpu", "h100-80g", "--gpus", 8, "--seq-len", 2048, "--method", "lora")
    said = dsrun(*one, "--activation-checkpointing", "full")
    assert "--activation-checkpointing none" in said.err
    assert "--activation-checkpointing none" not in dsrun(*one).err


@pytest.mark.parametrize(
    "words", [("--gpus", 10**8), ("--nodes", 10**8), ("--beams", 10**8, "--for", "inference")]
)
def test_what_no_machine_has_is_refused(dsrun, words):
    said = dsrun("plan", "llama-7b", "--gpu", "t4", *words)
    assert said.code == 2 and words[0] in said.err


def test_a_step_of_very_many_examples_is_planned_at_once(dsrun):
    """Micro batches that no card holds aren't tried one by one."""
    said = dsrun("plan", "llama-7b", "--gpu", "a100-80g", "--global-batch", 10**8, "--json")
    assert all(plan["setup"]["micro_batch"] <= 4096 for plan in json.loads(said.out)["plans"])


# What people ask


def test_lengths_in_the_terminal_as_data_and_as_a_picture(dsrun, tmp_path):
    one = ("plan", "llama-3-8b", "--gpu", "a100-80g", "--gpus", 8, "--seq-len", 4096, "--lengths")
    said = dsrun(*one)
    assert said.code == 0 and "longest" in said.out and "|" in said.out
    curves = json.loads(dsrun(*one, "--json").out)["lengths"]
    assert {curve["preset"].split()[0] for curve in curves} >= {"zero2", "zero3"}
    assert all(curve["points"][0]["bytes"] <= curve["points"][-1]["bytes"] for curve in curves)
    file = tmp_path / "lengths.svg"
    assert dsrun(*one, "--plot", file).code == 0
    assert "<svg" in file.read_text(encoding="utf-8")


def test_a_tight_plan_names_what_would_make_it_safe(dsrun):
    one = ("plan", "llama-3-8b", "--gpu", "a100-40g", "--gpus", 8, "--preset", "zero3", "--micro-batch", 1)
    one += ("--seq-len", 4096)
    roomy = json.loads(dsrun(*one, "--json").out)
    assert roomy["plans"][0]["verdict"] == "fits" and roomy["knobs"] == []
    needed = roomy["plans"][0]["gpu"]["needed_bytes"]
    memory = ("--gpu-memory", f"{needed / 0.97 / GIB:.3f}GiB", "--activation-checkpointing", "full")
    result = json.loads(dsrun(*one, *memory, "--json").out)
    assert result["plans"][0]["verdict"] == "tight"
    assert result["knobs"] and all(knob["saves_bytes"] > 0 for knob in result["knobs"])
    said = dsrun(*one, *memory)
    assert "The first is tight" in said.out and "s a step" in said.out


def test_cards_are_compared(dsrun, tmp_path):
    one = (
        "plan",
        "llama-3-8b",
        "--gpu",
        "a100-80g",
        "--gpus",
        8,
        "--price",
        1.5,
        "--card",
        "h100-80g=3",
        "--json",
    )
    rows = {row["card"]: row for row in json.loads(dsrun(*one).out)["cards"]}
    assert set(rows) == {"a100-80g", "h100-80g"}
    assert rows["h100-80g"]["hours"] < rows["a100-80g"]["hours"]
    for name, price in (("a100-80g", 1.5), ("h100-80g", 3)):
        assert rows[name]["price"] == pytest.approx(price * 8 * rows[name]["hours"])
        assert rows[name]["kilowatt_hours"] > 0
    every = json.loads(dsrun("plan", "llama-7b", "--gpu", "t4", "--card", "all", "--json").out)["cards"]
    assert len(every) == len(catalog.files("presets/gpus"))
    assert next(row for row in every if row["card"] == "t4")["price"] is None
    for words in (("--card", "a100-80"), ("--card", "t4=cheap"), ("--card", "t4=-1")):
        said = dsrun("plan", "llama-7b", "--gpu", "t4", *words)
        assert said.code == 1 and words[1] in said.err


def test_a_steps_timeline(dsrun):
    one = ("plan", "llama-3-8b", "--gpu", "a100-80g", "--gpus", 8, "--timeline")
    assert "between forward and backward" in dsrun(*one).out
    result = json.loads(dsrun(*one, "--json").out)
    assert max(each["bytes"] for each in result["timeline"]) == result["plans"][0]["gpu"]["allocated_bytes"]


def test_gpus_of_all_nodes_or_of_each(dsrun):
    one = ("plan", "llama-3-8b", "--gpu", "a100-80g")
    said = dsrun(*one, "--gpus", 64, "--nodes", 8)
    assert "512" in said.err and "--gpus 8 --nodes 8" in said.err
    assert "in all" not in dsrun(*one, "--gpus", 8, "--nodes", 8).err


def test_of_plans_that_tie_the_surest_and_simplest_comes_first(dsrun):
    """As finetune takes it."""
    plans = json.loads(dsrun("plan", "llama-3-8b", "--gpu", "a100-80g", "--gpus", 8, "--json").out)["plans"]
    fitting = [plan for plan in plans if plan["verdict"] != "out of memory"]
    fastest = min(plan["speed"]["seconds_per_step"] for plan in fitting)
    assert fitting[0]["speed"]["seconds_per_step"] <= search.TIE * fastest
    tied = [plan for plan in fitting if plan["speed"]["seconds_per_step"] <= search.TIE * fastest]
    assert min(fitting[0]["chance"], search.SURE) == max(min(plan["chance"], search.SURE) for plan in tied)


def test_layouts_that_tie_are_shown_once(dsrun):
    few, every = (json.loads(dsrun(*TWO_NODES, "--json", *more).out) for more in ((), ("--wide",)))
    assert len(few["layouts"]) < len(every["layouts"])
    assert any("tie" in note for note in few["notes"]) and not any("tie" in note for note in every["notes"])
    refused = [bool(row["refused"]) for row in few["layouts"] if row["verdict"] != "out of memory"]
    assert refused == sorted(refused)


# What is not modelled


def test_what_the_planner_does_not_model_is_noted_or_refused(dsrun):
    one = ("plan", "llama-7b", "--gpu", "a100-80g", "--gpus", 8)
    assert "--compile" in dsrun(*one, "--compile").err
    assert "torch.compile" not in dsrun(*one).err
    for words in (("--precision", "fp8"), ("--loss", "dpo"), ("--method", "grpo")):
        said = dsrun(*one, *words)
        assert said.code == 2 and words[0] in said.err


def test_4_bit_weights_that_ranks_share(dsrun):
    """They are planned, behind what finetune runs, and no line starts them."""
    one = ("plan", "llama-3-70b", "--gpu", "a100-80g", "--gpus", 8, "--method", "qlora")
    result = json.loads(dsrun(*one, "--json").out)
    by_name = {plan["preset"]: plan for plan in result["plans"]}
    assert by_name["zero3"]["verdict"] == "fits" and "zero3" not in result["skipped"]
    assert by_name["zero3"]["gpu"]["terms"]["weights"] < by_name["zero2"]["gpu"]["terms"]["weights"] / 7
    assert result["plans"][0]["preset"] != "zero3"
    assert any("zero3" in note and "4-bit" in note for note in result["notes"])
    alone = dsrun(*one, "--preset", "zero3")
    assert alone.code == 0 and "With finetune" not in alone.out


# --trainer


def test_another_trainer(dsrun):
    """Its defaults are planned, those that change a figure are said with their sources, and finetune isn't offered."""
    one = ("plan", "llama-3-8b", "--gpu", "a100-80g", "--gpus", 8, "--seq-len", 4096, "--preset", "zero3")
    own, other = (
        json.loads(dsrun(*one, "--json", *more).out) for more in ((), ("--trainer", "llama-factory"))
    )
    assert (own["trainer"], other["trainer"]) == ("dsrun", "llama-factory")
    assert other["plans"][0]["setup"]["variable_lengths"] and other["plans"][0]["setup"]["checkpointing"] == 1
    assert any(
        "checkpointing" in note and "GiB less" in note and "model_args" in note for note in other["notes"]
    )
    assert any("Hugging Face Trainer" in note and "GiB more" in note for note in own["notes"])
    said = dsrun(*one, "--trainer", "llama-factory")
    assert "With finetune" not in said.out and "With finetune" in dsrun(*one).out


def test_what_is_said_comes_before_a_trainers_default(dsrun):
    one = ("plan", "llama-3-8b", "--gpu", "a100-80g", "--preset", "zero2", "--trainer", "hf", "--json")
    plain = json.loads(dsrun(*one).out)["plans"][0]["setup"]
    said = json.loads(dsrun(*one, "--packing", "--activation-checkpointing", "full").out)["plans"][0]["setup"]
    assert (plain["checkpointing"], plain["variable_lengths"]) == (0, True)
    assert (said["checkpointing"], said["variable_lengths"]) == (1, False)


def test_a_trainer_without_deepspeed(dsrun):
    one = ("plan", "llama-3-8b", "--gpu", "a100-80g", "--gpus", 8, "--trainer", "torchtune")
    plans = json.loads(dsrun(*one, "--json").out)["plans"]
    assert plans and {plan["setup"]["engine"] for plan in plans} == {"fsdp"}
    said = dsrun(*one, "--preset", "zero3")
    assert said.code == 1 and "no DeepSpeed" in said.err


def test_a_trainer_that_there_is_not(dsrun):
    said = dsrun("plan", "llama-3-8b", "--gpu", "a100-80g", "--trainer", "axolot")
    assert said.code == 1 and "'axolotl'" in said.err
    assert dsrun("plan", "llama-3-8b", "--gpu", "a100-80g", "--trainer", "hf", "--layouts").code == 2


def test_muon_is_modelled(dsrun):
    """One momentum in fp32 for matrices, not two, and only presets that it trains under."""
    one = ("plan", "llama-7b", "--gpu", "a100-80g", "--gpus", 8, "--json")
    adamw, muon = (json.loads(dsrun(*one, *more).out)["plans"] for more in ((), ("--optimizer", "muon")))
    by_name = {plan["preset"]: plan for plan in adamw}
    assert {plan["preset"] for plan in muon} < set(by_name)
    assert all(
        plan["gpu"]["terms"]["moments"] < by_name[plan["preset"]]["gpu"]["terms"]["moments"] for plan in muon
    )


# --for inference


def test_inference(dsrun, untouched):
    said = dsrun("plan", "llama-7b", "--gpu", "rtx-4090", "--for", "inference")
    assert said.code == 0
    rows = {line.split()[0]: line for line in said.out.splitlines() if line.startswith("  ")}
    assert list(rows) == ["fp32", "16-bit", "int8", "int4"]
    assert "out of memory" in rows["fp32"]
    assert all("fits" in rows[name] for name in ("16-bit", "int8", "int4"))
    assert "weights 12.55, cache 1.00" in rows["16-bit"]  # 2 x 6.74e9 bytes; 2 x 32 x 4096 x 2 bytes x 2048


def test_inference_of_a_model_in_numbers(dsrun):
    """Its longest context is what the memory allows: nobody said what it was made for."""
    args = ("plan", "--params", "7B", "--gpu", "h200", "--for", "inference", "--json")
    result = json.loads(dsrun(*args).out)
    assert result["seq_len"] == 2048
    contexts = [row["longest_context"] for row in result["inference"]]
    assert contexts[1] < contexts[2] < contexts[3]
    known = json.loads(dsrun("plan", "llama-7b", *args[3:]).out)["inference"]
    assert {row["longest_context"] for row in known} == {2048}


def test_inference_with_beams_takes_a_cache_for_each(dsrun):
    one = ("plan", "llama-7b", "--gpu", "a100-80g", "--for", "inference", "--json")
    plain, four = (json.loads(dsrun(*one, *more).out)["inference"] for more in ((), ("--beams", 4)))
    for before, after in zip(plain, four, strict=True):
        assert after["terms"]["cache"] == 4 * before["terms"]["cache"]
        assert after["terms"]["reordered"] == after["terms"]["cache"] / 32 / 2


def test_inference_with_weights_on_the_host(dsrun):
    args = ("plan", "llama-2-70b", "--gpu", "rtx-4090", "--for", "inference", "--offload-weights")
    said = dsrun(*args, "--host-memory", "256GiB")
    assert said.code == 0
    assert "128.5 GiB in host memory" in said.out and "int4" not in said.out
    assert dsrun(*args, "--host-memory", "64GiB").code == 1


@pytest.mark.parametrize("words", [("--beams", 4), ("--offload-weights",)])
def test_what_is_for_inference_is_not_for_training(dsrun, words):
    said = dsrun("plan", "llama-7b", "--gpu", "t4", *words)
    assert said.code == 2 and words[0] in said.err


def test_inference_as_json(dsrun):
    args = ("plan", "llama-7b", "--gpu", "t4", "--for", "inference", "--seq-len", 1000, "--micro-batch", 3)
    result = json.loads(dsrun(*args, "--json").out, parse_constant=pytest.fail)
    assert set(result) == {"version", "model", "place", "seq_len", "batch", "beams", "inference"}
    assert (result["model"], result["seq_len"], result["batch"]) == ("llama-7b", 1000, 3)
    for row in result["inference"]:
        assert set(row) == {"width", "bytes", "terms", "longest_context", "verdict", "host_bytes"}
        assert row["bytes"] >= sum(row["terms"].values())
        assert (row["verdict"] == "fits") == (row["longest_context"] >= 1000)


# This machine


def test_hidden_gpus_are_not_planned_for(dsrun, monkeypatch):
    gpus = tuple(Gpu(i, "NVIDIA A100-SXM4-80GB", f"GPU-{i}", 80 * GIB, (8, 0), 70 * GIB) for i in range(4))
    machine = Machine("cuda", gpus, 32, "4 x A100", 500 * GIB)
    monkeypatch.setattr("dsrun.cluster.devices.detect", lambda environ: machine)
    assert (
        "on 4 x NVIDIA A100-SXM4-80GB as in this machine, 70.0 GiB free each" in dsrun("plan", "llama-7b").out
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    assert "on 2 x NVIDIA A100-SXM4-80GB" in dsrun("plan", "llama-7b").out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "on 1 x t4" in dsrun("plan", "llama-7b", "--gpu", "t4").out
    assert dsrun("plan", "llama-7b").code == 1


def test_a_machine_that_is_named_is_not_looked_at(dsrun, monkeypatch):
    monkeypatch.setattr("dsrun.cluster.devices.detect", lambda environ: pytest.fail("asked for no reason"))
    assert dsrun("plan", "llama-7b", "--gpu", "t4").code == 0
    assert dsrun("plan", "llama-7b", "--gpu-memory", "24GiB").code == 0


def test_without_a_gpu_usual_ones_are_planned_too(dsrun, monkeypatch):
    machine = Machine("cpu", (), 4, "no GPU", 16 * GIB)
    monkeypatch.setattr("dsrun.cluster.devices.detect", lambda environ: machine)
    result = json.loads(dsrun("plan", "llama-7b", "--global-batch", 16, "--json").out)
    assert [row["gpus"] for row in result["usual"]] == [f"{n} x {gpu}" for gpu, n in plan_target.USUAL_GPUS]
    named = json.loads(
        dsrun("plan", "llama-7b", "--global-batch", 16, "--gpu", "a100-80g", "--gpus", 8, "--json").out
    )
    of_eight = next(row for row in result["usual"] if row["gpus"] == "8 x a100-80g")
    assert of_eight == {"gpus": "8 x a100-80g", **named["plans"][0]}
    assert named["usual"] == []
    text = dsrun("plan", "llama-7b").out
    assert "8 x a100-80g" in text
    assert max(map(len, text.splitlines())) <= 120


def test_what_fits_here_needs_no_gpu(dsrun, monkeypatch):
    machine = Machine("cpu", (), 4, "no GPU", 16 * GIB)
    monkeypatch.setattr("dsrun.cluster.devices.detect", lambda environ: machine)
    assert json.loads(dsrun("plan", "llama-tiny", "--json").out)["usual"] == []


# --layouts

TWO_NODES = (
    "plan",
    "llama-2-70b",
    "--gpu",
    "a100-80g",
    "--gpus",
    8,
    "--nodes",
    2,
    "--seq-len",
    2048,
    "--layouts",
)


def test_layouts_as_json(dsrun):
    result = json.loads(dsrun(*TWO_NODES, "--json").out, parse_constant=pytest.fail)
    assert set(result) == {"version", "model", "place", "layouts", "notes"}
    first, *others = result["layouts"]
    assert (first["dp"], first["stage"], first["engine"], first["refused"]) == (16, 3, "dsrun", None)
    for one in (first, *others):
        assert one["dp"] * one["tp"] * one["sp"] * one["pp"] == 16
        assert sum(one["terms"].values()) == pytest.approx(one["seconds_per_step"])
        assert (one["engine"] == "dsrun") == (one["refused"] is None)
    assert len({(one["tp"], one["sp"], one["pp"]) for one in others}) == len(others)


def test_layouts_as_a_table(dsrun):
    said = dsrun(*TWO_NODES)
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= 100
    (line,) = (line for line in said.out.splitlines() if line.startswith("With finetune: "))
    words = line.removeprefix("With finetune: ").split()
    options = finetune.command.make_context(
        "finetune", ["llama-2-70b", *words], resilient_parsing=True
    ).params
    assert (options["preset"], options["micro_batch"]) == ("zero3", 1)


def test_layouts_where_nothing_fits(dsrun):
    said = dsrun("plan", "llama-2-70b", "--gpu", "t4", "--gpus", 2, "--layouts")
    assert said.code == 1
    assert "Nothing fits" in said.out


def test_layouts_are_for_gpus(dsrun):
    assert dsrun("plan", "llama-7b", "--layouts").code == 2


# --calibrate


@pytest.fixture
def run_folder(work):
    """A run that took 1.5 times the seconds predicted."""
    from dsrun.job.job import DataSpec, HostDevices, Job, ModelSpec, Prepared, TrainingSpec

    training = TrainingSpec()
    prediction = {
        "device": "t4", "gpu_held_bytes": 4.0 * GIB, "gpu_allocated_bytes": 8.0 * GIB, "gpu_reserved_bytes": 9.0 * GIB,
        "host_bytes": 5.0 * GIB, "step_seconds": 2.0,
    }  # fmt: skip
    job = Job(
        run_dir=str(work / "run"), model=ModelSpec("x", "folder", "/x", "auto"),
        data=DataSpec(train_file="/x", eval_file=None), training=training, preset="zero2", precision="fp16",
        accelerator="cuda", hosts=(HostDevices("localhost", (0,)),), ds_config={},
        prepared=Prepared("/x", "/x", None), dsrun_version="0", prediction=prediction,
    )  # fmt: skip
    peaks = {
        "gpu_allocated_bytes": 10 * GIB, "gpu_reserved_bytes": 11 * GIB, "host_peak_bytes": 6 * GIB,
        "step_seconds": 3.0,
    }  # fmt: skip
    (work / "run" / "state").mkdir(parents=True)
    (work / "run" / "job.json").write_text(job.to_json(), encoding="utf-8")
    state = {"status": "finished", "peaks": peaks}
    (work / "run" / "state" / "rank-0.json").write_text(json.dumps(state), encoding="utf-8")


def seconds(said) -> float:
    return json.loads(said.out)["plans"][0]["speed"]["seconds_per_step"]


def test_calibrate(dsrun, run_folder, tmp_path):
    plan = ("plan", "llama-tiny", "--json", "--preset", "zero2", "--gpu")
    before = {gpu: seconds(dsrun(*plan, gpu)) for gpu in ("t4", "v100-32g")}
    said = dsrun("plan", "--calibrate", "run")
    path = tmp_path / "config" / "dsrun" / "planner.toml"
    assert said.code == 0
    assert said.out.startswith("t4, 1 run:\n")
    errors = dict(re.findall(r"^  (.+?)  +median error (.+)$", said.out, re.MULTILINE))
    assert errors == {
        "GPU memory in use": "20.0% -> 0.0%", "GPU memory held": "18.2% -> 0.0%", "host memory": "16.7% -> 0.0%",
        "seconds a step": "33.3% -> 0.0%",
    }  # fmt: skip
    assert f"written to {path}" in said.out
    after = {gpu: seconds(dsrun(*plan, gpu)) for gpu in ("t4", "v100-32g")}
    assert after["t4"] == pytest.approx(1.5 * before["t4"])
    assert after["v100-32g"] == before["v100-32g"]


def test_calibrate_as_json(dsrun, run_folder, tmp_path):
    assert dsrun("plan", "--calibrate", "run", "run").out.startswith("t4, 2 runs:\n")
    said = dsrun("plan", "--calibrate", "run", "run", "--json")
    result = json.loads(said.out)
    assert result["file"] == str(tmp_path / "config" / "dsrun" / "planner.toml")
    (device,) = result["devices"]
    assert (device["device"], device["runs"]) == ("t4", 2)
    learnt = {"moving": 1.5, "reserved": 1.0, "process_gib": 1.0, "seconds": 1.5}
    assert device["calibration"] == {**learnt, "lengths": 1.0, "gpu_gib": 0.0}


def test_a_broken_calibration_is_reported(dsrun, tmp_path):
    (tmp_path / "config" / "dsrun").mkdir()
    (tmp_path / "config" / "dsrun" / "planner.toml").write_text("[t4\n", encoding="utf-8")
    said = dsrun("plan", "llama-7b", "--gpu", "t4")
    assert (said.code, said.out) == (1, "")
    assert "planner.toml" in said.err


# What it loads


@pytest.mark.parametrize(
    "args",
    [
        ("plan", "--help"), TWO_V100S, (*TWO_V100S, "--json"), (*TWO_V100S, "--components"),
        ("plan", "llama-7b", "--gpu", "t4", "--for", "inference"), ("plan", "llama-tiny"), ("plan", "lama-tiny"),
        ("plan", "llama-2-70b", "--gpu", "t4"), ("plan", "--calibrate", "none"),
    ],
)  # fmt: skip
def test_nothing_heavy_is_loaded(args, tmp_path):
    code = (
        "import sys, dsrun.cli\n"
        "report = sys.argv.pop(1)\n"
        "try: dsrun.cli.main(sys.argv[1:])\n"
        "finally: open(report, 'w').write(' '.join(sys.modules))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "modules"), *map(str, args)], check=False,
        capture_output=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    loaded = {name.partition(".")[0] for name in (tmp_path / "modules").read_text(encoding="utf-8").split()}
    assert "dsrun" in loaded
    assert not loaded & HEAVY


def test_without_matplotlib(dsrun, monkeypatch, untouched):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    said = dsrun(*TWO_V100S, "--plot", "x.png")
    assert (said.code, said.out) == (1, "")
    assert "needs matplotlib" in said.err
