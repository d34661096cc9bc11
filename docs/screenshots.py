"""Make the pictures of the board and the report in docs/: light, dark and narrow.

    python docs/screenshots.py [--keep FOLDER]

The runs are drawn, not trained: a sweep on eight GPUs in every state. Needs chromium and chromedriver, and selenium.
--keep leaves the runs in a folder, to look at them: dsrun board FOLDER.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "reports")]

import browser  # noqa: E402
import uvicorn  # noqa: E402

from dsrun.job import run_folder  # noqa: E402
from dsrun.job.job import DataSpec, HostDevices, Job, ModelSpec, Prepared, TrainingSpec  # noqa: E402
from dsrun.reports import report  # noqa: E402
from dsrun.reports.board.app import make_app  # noqa: E402
from dsrun.reports.board.known_runs import KnownRuns, key_of  # noqa: E402
from dsrun.reports.board.serve import listening  # noqa: E402

PICTURES = ROOT / "docs" / "howto"
STEPS, BEGAN, STEP_S = 1200, 1_780_000_000.0, 2.0
FAILED = {
    "cause": "gpu_oom",
    "summary": "A GPU ran out of memory in ZeRO's buffers for communication. 0.09 GiB were asked for on a card of 79.2 "
    "GiB, of which PyTorch had 77.8 GiB in use.",
    "rank": 5,
    "host": "node01",
    "time": "2026-05-28 22:47:12",
    "line": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 88.00 MiB. GPU 5 has 79.15 GiB",
    "where": "logs/rank-5.log:1043",
    "next_step": "Smaller reduce_bucket_size, allgather_bucket_size or stage3_prefetch_bucket_size; then a smaller "
    "micro batch.",
}
HISTOGRAM = [
    3,
    18,
    160,
    900,
    2900,
    6100,
    8800,
    9400,
    7900,
    5800,
    3900,
    2500,
    1500,
    900,
    560,
    330,
    180,
    90,
    60,
    30,
    14,
    6,
    3,
    1,
]


def job_of(run_dir: Path, *, preset: str, lr: float) -> Job:
    """A fine-tune on the eight GPUs of a machine."""
    stage = int(preset[4])
    config = {
        "train_batch_size": 128, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True}, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 500_000_000},
    }  # fmt: skip
    origins = {
        "config": {
            "optimizer.params.lr": "command line", "zero_optimization.stage": f"preset: {preset}",
            "zero_optimization.overlap_comm": f"preset: {preset}", "bf16.enabled": "derived: every GPU has bf16",
        },
        "options": {"lr": "command line", "preset": "run file: sweep.toml", "micro_batch": "built-in default"},
    }  # fmt: skip
    return Job(
        run_dir=str(run_dir), model=ModelSpec("llama-2-7b", "folder", "/models/llama-2-7b", "llama-2"),
        data=DataSpec(train_file="/data/alpaca.jsonl", eval_file="/data/held-out.jsonl"),
        training=TrainingSpec(lr=lr, epochs=None, max_steps=STEPS), preset=preset, precision="bf16",
        accelerator="cuda", hosts=(HostDevices("localhost", tuple(range(8))),), ds_config=config,
        prepared=Prepared("/cache/model", "/cache/rows", None), dsrun_version="0.1.0", origins=origins,
        prediction={"device": "a100-80g", "gpu_allocated_bytes": 6.4e10, "host_bytes": 9e10},
    )  # fmt: skip


def draw_run(
    path: Path, state: str, steps: int, *, preset: str, lr: float, began: float, fields: dict[str, Any]
) -> None:
    """A run's folder as it might be after so many steps."""
    chance = random.Random(path.name)  # noqa: S311 - a picture
    (path / "state").mkdir(parents=True)
    (path / "job.json").write_text(job_of(path, preset=preset, lr=lr).to_json())
    speed = 1.0 if preset == "zero2" else 0.86
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            fitted = 1.35 + (0.05 if lr < 2e-5 else 0) + 1.1 * math.exp(-step / (180 if lr > 2e-5 else 260))
            seconds = (1.9 + 0.2 * chance.random()) / speed
            line = {
                "time": began + step * STEP_S, "step": step, "loss": fitted + chance.gauss(0, 0.035),
                "lr": lr * min(1, step / 100) * (1 - step / STEPS),
                "grad_norm": 0.7 + abs(chance.gauss(0, 0.15)) + 3 * (step == 412),
                "tokens": 65_536 - chance.randint(0, 9000), "seconds": seconds, "skipped": 0, "loss_scale": None,
                "memory_bytes": int(5.9e10 + min(step, 60) * 4e7),
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")
            if step % 200 == 0:
                file.write(
                    json.dumps({"time": line["time"], "step": step, "eval_loss": fitted + 0.03}) + "\n"
                )
    events: list[dict[str, Any]] = [
        {"event": "phase", "text": "loading libraries"},
        {
            "event": "plan",
            "total_steps": STEPS,
            "start_step": 0,
            "step_rows": 128,
            "train_rows": 52_055,
            "eval_rows": 512,
        },
        *(
            {"event": "checkpoint", "step": step, "path": f"{path}/checkpoints/step-{step}"}
            for step in range(200, steps + 1, 200)
        ),
    ]
    times = [began, began + 20, *(began + step * STEP_S for step in range(200, steps + 1, 200))]
    lines = [{"time": when, **event} for when, event in zip(times, events, strict=True)]
    lines.append({"time": began + steps * STEP_S, "event": "phase", "text": "training"})
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for rank in range(8):
        peaks = {
            "gpu_allocated_bytes": int(6.0e10 + rank * 2.5e8),
            "gpu_reserved_bytes": int(6.8e10),
            "host_peak_bytes": int(9e9),
        }
        done = state == "finished"
        told = {
            "rank": rank,
            "host": "node01",
            "status": "finished" if done else "running",
            "peaks": peaks if done else None,
        }
        (path / "state" / f"rank-{rank}.json").write_text(json.dumps(told))
    (path / "data.json").write_text(json.dumps({"train": data_of()}))
    record = {"state": state, "time": began + steps * STEP_S, "pid": 1, **fields}
    (path / "run.json").write_text(json.dumps(record))


def data_of() -> dict[str, Any]:
    """The report on some rows."""
    rows = sum(HISTOGRAM)
    file = {
        "file": "/data/alpaca.jsonl",
        "format": "instruction",
        "weight": 1.0,
        "rows": rows,
        "tokens": rows * 181,
        "left_out": 31,
    }
    return {
        "files": [file], "rows": rows, "tokens": rows * 181, "target_tokens": rows * 88, "trained_on": "responses",
        "truncated": 0.004, "percentiles": {"50": 170, "90": 301, "95": 344, "99": 430}, "longest": 551,
        "dropped": {"no answer": 31}, "histogram": {"width": 23, "counts": HISTOGRAM},
    }  # fmt: skip


def draw_runs(home: Path) -> Path:
    """Runs in every state. Returns the folder of the one that goes on."""
    now = time.time()
    why = {
        "why": "CUDA out of memory",
        "problems": ["rank 5 failed first: torch.OutOfMemoryError: CUDA out of memory"],
    }
    for name, state, steps, preset, lr, fields in (
        ("llama-2-7b-zero3", "running", 870, "zero3", 2e-5, {}),
        ("sweep/lr-3e-5", "finished", STEPS, "zero2", 3e-5, {}),
        ("sweep/lr-1e-4", "failed", 640, "zero2", 1e-4, {**why, "diagnosis": FAILED}),
        ("sweep/lr-1e-5", "finished", STEPS, "zero2", 1e-5, {}),
        ("llama-2-7b-zero1", "interrupted", 300, "zero1", 2e-5, {}),
    ):
        now -= 3000
        draw_run(home / name, state, steps, preset=preset, lr=lr, began=now, fields=fields)
    return home / "llama-2-7b-zero3"


def take(home: Path, going_on: Path) -> None:
    """The pictures, with one of the runs held as if its dsrun lived."""
    pages = home.parent / "report.html"
    report.write(report.of_runs([home / "sweep" / "lr-3e-5"]), pages)
    with run_folder.held(going_on), listening(0) as listener:
        port = listener.getsockname()[1]
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(KnownRuns(home), "picture", port), log_level="warning", lifespan="off", ws="none"
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with browser.opened() as driver:
                driver.get(f"http://127.0.0.1:{port}/?token=picture")
                picture(driver, "board-light.png", (1280, 640))
                picture(driver, "board-dark.png", (1280, 640), dark=True)
                picture(driver, "board-narrow.png", (390, 844))
                keys = [key_of(f"sweep/lr-{lr}") for lr in ("1e-5", "3e-5", "1e-4")]
                driver.get(f"http://127.0.0.1:{port}/compare?" + "&".join(f"run={key}" for key in keys))
                picture(driver, "board-compare.png", (1280, 1100))
                driver.get(pages.as_uri())
                picture(driver, "report-light.png", (1280, 1500))
                picture(driver, "report-dark.png", (1280, 1500), dark=True)
                picture(driver, "report-narrow.png", (390, 1100))
        finally:
            server.should_exit = True
            thread.join()


def picture(driver: Any, name: str, size: tuple[int, int], *, dark: bool = False) -> None:
    """Take a picture of the window, into docs/howto/."""
    browser.resize(driver, size)
    browser.scheme(driver, dark=dark)
    time.sleep(0.3)  # the page's own arrangement
    driver.save_screenshot(str(PICTURES / name))


def main() -> None:
    """Draw the runs, take the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    if absent := browser.missing():
        sys.exit(f"not installed here: {absent}")
    if options.keep:
        draw_runs(options.keep)
        return
    lab = Path(tempfile.gettempdir()) / "lab"
    lab.mkdir()  # the pictures show its name
    try:
        take(lab / "runs", draw_runs(lab / "runs"))
    finally:
        shutil.rmtree(lab)


if __name__ == "__main__":
    main()
