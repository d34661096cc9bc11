"""A lab's preset with a scheduler of DeepSpeed's: what is printed, planned, written and trained is one and the same."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed", "transformers")

from running import COMMON, cut_off, finish, same

pytestmark = [pytest.mark.slow, pytest.mark.full]
STEPS, SAVED = 6, 3
SCHEDULERS = {
    "WarmupDecayLR": {"total_num_steps": STEPS, "warmup_num_steps": 3, "warmup_max_lr": 2e-3},
    "WarmupLR": {"warmup_num_steps": 4, "warmup_max_lr": 1e-3, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": STEPS, "warmup_num_steps": 2},
    "OneCycle": {
        "cycle_min_lr": 1e-4,
        "cycle_max_lr": 2e-3,
        "cycle_first_step_size": 2,
        "decay_lr_rate": 0.1,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-4,
        "lr_range_test_step_size": 2,
        "lr_range_test_step_rate": 1.0,
    },
}


def preset_of(kind: str) -> str:
    """A preset with this scheduler; the rest of its step is drawn, the same in every run."""
    draw = random.Random(kind)
    micro = draw.choice([1, 2, 4])
    sections = {
        "": {
            "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 4 // micro,
            "gradient_clipping": draw.choice([0.5, 2.0]),
        },
        ".optimizer.params": {
            "lr": draw.choice([3e-4, 1e-3]), "betas": draw.choice([[0.9, 0.95], [0.8, 0.99]]),
            "weight_decay": draw.choice([0.01, 0.1]),
        },
        ".fp16": {"enabled": False},
        ".bf16": {"enabled": False},
        ".scheduler": {"type": kind},
        ".scheduler.params": SCHEDULERS[kind],
    }  # fmt: skip
    lines = ['summary = "a lab\'s own"', f'extends = "{draw.choice(["zero1", "zero2"])}"']
    for name, table in sections.items():
        lines += [f"[config{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def rates_of(kind: str, lr: float) -> list[float]:
    """The learning rate of each step, by the scheduler alone."""
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = getattr(lr_schedules, kind)(optimizer, **SCHEDULERS[kind])
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return rates


@pytest.fixture(scope="module")
def run(tmp_path_factory, dsrun_here, environ, data):
    """`run(kind)`: the words of the finished run without its folder, and the folder; each is done once."""
    folder, done = tmp_path_factory.mktemp("schedulers"), {}
    given = list(COMMON)
    for flag in ("--warmup-steps", "--micro-batch", "--grad-accum", "--precision"):  # the preset says them
        del given[given.index(flag) : given.index(flag) + 2]

    def made(kind):
        if kind not in done:
            preset, run_dir = folder / f"{kind} 预设.toml", folder / kind
            preset.write_text(preset_of(kind), encoding="utf-8")
            words = [
                "llama-tiny", "--preset", str(preset), "--gpus", "2", *given, *data, "--max-steps", str(STEPS),
                "--save-steps", str(SAVED), "--keep", "9",
            ]  # fmt: skip
            ended = finish(dsrun_here("finetune", *words, "--output-dir", run_dir), run_dir)
            assert ended.code == 0, ended.err
            done[kind] = words, ended
        return done[kind]

    return made


def answer(environ, *words) -> dict:
    command = [sys.executable, "-m", "dsrun", *map(str, words)]
    return json.loads(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_scheduler_sets_each_steps_rate(run, kind):
    _, done = run(kind)
    lr = json.loads(done.read("deepspeed.json"))["optimizer"]["params"]["lr"]
    found = [line["lr"] for line in done.metrics if "loss" in line]
    assert found == pytest.approx(rates_of(kind, lr), rel=1e-6)
    assert len(set(found)) > 2, "it moves"


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_what_is_printed_planned_and_written_is_what_ran(run, environ, tmp_path, kind):
    words, done = run(kind)
    written = json.loads(done.read("deepspeed.json"))
    assert written["scheduler"] == {"type": kind, "params": SCHEDULERS[kind]}
    planned = answer(environ, "finetune", *words, "--output-dir", tmp_path / "run", "--dry-run", "--json")
    assert planned["job"]["ds_config"] == written
    assert answer(environ, "preset", words[2], "--model", "llama-tiny", "--gpus", "2") == written
    step = json.loads(done.read("job.json"))["training"]
    assert step["lr"] == planned["options"]["lr"]["value"] == written["optimizer"]["params"]["lr"]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_another_number_of_ranks_goes_on_with_its_rates(run, dsrun_here, tmp_path, kind):
    _, done = run(kind)
    run_dir = tmp_path / "elsewhere"
    cut_off(done.run_dir, SAVED, run_dir)
    resumed = finish(dsrun_here("resume", run_dir, "--gpus", "1"), run_dir)
    assert resumed.code == 0, resumed.err
    rates, before = (
        {line["step"]: line["lr"] for line in one.metrics if "loss" in line} for one in (resumed, done)
    )
    assert rates == pytest.approx(before, rel=1e-6)
    same(resumed.losses, done.losses)
