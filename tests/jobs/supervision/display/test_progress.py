from __future__ import annotations

import io
import json
import sys

import pytest

from dsrun.jobs.supervision.display import progress
from dsrun.jobs.supervision.display.progress import LiveView, Meter, PlainView, describe_event
from dsrun.words import clock

STEP = {
    "time": 1.0, "step": 3, "loss": 2.34567, "lr": 1e-4, "grad_norm": 1.5, "tokens": 4000, "seconds": 0.5,
    "skipped": 0, "loss_scale": None, "memory_bytes": 3 << 30,
}  # fmt: skip
PLAN = {
    "event": "plan",
    "total_steps": 10,
    "start_step": 0,
    "train_rows": 1200,
    "eval_rows": 12,
    "step_rows": 8,
}


def step(number: int, **fields):
    return {**STEP, "step": number, **fields}


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still; `now[0]` is its time."""
    time = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: time[0])
    return time


@pytest.fixture
def said():
    return []


@pytest.fixture
def view(said, now, tmp_path):
    return PlainView(tmp_path, said.append)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (0.4, "0:00"), (9, "0:09"), (59.6, "1:00"), (90, "1:30"), (3599.7, "1:00:00"), (7265, "2:01:05"),
     (100 * 3600, "100:00:00")],
)  # fmt: skip
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_the_line_says_everything_worth_a_look():
    meter = Meter()
    meter.plan(10, 0)
    assert meter.metrics(STEP)
    text = meter.text()
    for part in (
        "step 3/10",
        "loss 2.3457",
        "8,000 tokens/s",
        "3.00 GiB",
        "0:04 left",
    ):  # 7 steps of half a second
        assert part in text
    assert "scale" not in text


def test_fp16_shows_its_loss_scale_and_what_it_skipped():
    meter = Meter()
    meter.plan(10, 0)
    meter.metrics({**STEP, "loss_scale": 65536.0, "skipped": 2})
    assert "scale 65536" in meter.text()
    assert "skipped 2" in meter.text()


def test_an_evaluation_is_no_step():
    meter = Meter()
    meter.plan(10, 0)
    assert not meter.metrics({"step": 5, "eval_loss": 2.0})
    assert meter.step == 0


def test_speed_is_that_of_the_last_steps():
    meter = Meter()
    meter.plan(1000, 0)
    meter.metrics(step(1, seconds=60.0))  # the first one compiles
    for number in range(2, 2 + progress.SPEED_WINDOW):
        meter.metrics(step(number))
    assert meter.tokens_per_s == pytest.approx(8000)
    assert meter.seconds_left == pytest.approx(0.5 * (1000 - meter.step))


def test_speed_before_the_first_step():
    meter = Meter()
    assert meter.tokens_per_s == 0
    assert meter.seconds_left == 0


def test_a_resumed_run_counts_from_where_it_goes_on():
    meter = Meter()
    meter.plan(10, 8)
    meter.metrics(step(9))
    assert meter.seconds_left == pytest.approx(0.5)


def test_lines_every_ten_seconds_and_at_the_end(view, said, now):
    view.event(PLAN)
    said.clear()
    for number in range(1, 11):
        view.metrics(step(number))
        now[0] += 4
    steps = [line.split()[1] for line in said]
    assert steps == ["1/10", "4/10", "7/10", "10/10"]


def test_events_in_words(view, said):
    view.event(PLAN)
    view.event({"event": "phase", "text": "loading the model"})
    view.event({"event": "eval", "step": 4, "loss": 3.25})
    view.event({"event": "checkpoint", "step": 4, "path": "/runs/a/checkpoints/step-4"})
    view.event({"event": "scores", "when": "after", "rows": 7, "scores": {"rouge-l": 31.234}, "path": "/x"})
    assert "10 steps of 8 rows" in said[0]
    assert "1,200" in said[0]
    assert "from step" not in said[0]
    assert said[1] == "loading the model"
    assert "step 4" in said[2]
    assert "3.25" in said[2]
    assert "/runs/a/checkpoints/step-4" in said[3]
    assert "ROUGE-L 31.23" in said[4]
    assert "7" in said[4]


def test_a_resumed_plan_says_from_where():
    assert "from step 6" in describe_event({**PLAN, "start_step": 6})


def test_events_that_need_no_words():
    assert describe_event({"event": "model", "path": "/x"}) == ""
    assert describe_event({"event": "something new"}) == ""


@pytest.fixture
def terminal(monkeypatch, now):
    """What a LiveView writes to a terminal of 60 columns."""
    from rich.console import Console

    output = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")  # where the tests run with TERM=dumb, rich moves no line

    def on_paper(*, stderr: bool, **options):
        assert stderr, "talk goes to stderr"
        return Console(file=output, force_terminal=True, color_system=None, width=60, **options)

    monkeypatch.setattr("rich.console.Console", on_paper)
    return output


def test_a_line_that_moves(terminal, tmp_path):
    with LiveView(tmp_path) as view:
        view.event(PLAN)
        view.event({"event": "phase", "text": "loading the model"})
        view.metrics(step(5))
        view.metrics({"step": 5, "eval_loss": 1.0})
        view.event({"event": "eval", "step": 5, "loss": 1.0})
        view.metrics(step(10))
    assert "10 steps of 8 rows" in terminal.getvalue()
    assert "step 5: evaluation loss 1.0000" in terminal.getvalue()
    assert "step 10/10" in terminal.getvalue()


def test_an_event_is_not_told_before_the_step_that_it_follows(view, said, tmp_path):
    (tmp_path / "events.jsonl").write_text(
        "".join(
            json.dumps({"time": time, **event}) + "\n"
            for time, event in ((1, PLAN), (3, {"event": "phase", "text": "writing the model"}))
        )
    )
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step(10, time=2)) + "\n")
    assert view()
    assert [text.split()[0] for text in said] == ["10", "step", "writing"]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_line_is_shorter_than_the_terminal_is_wide(monkeypatch, tmp_path, width):
    from rich.cells import cell_len

    monkeypatch.setenv("COLUMNS", str(width))
    view = LiveView(tmp_path)
    view.event(PLAN)
    view.metrics(step(5))
    assert view.line().startswith("step 5/10")
    assert ("━" in view.line()) == (width >= 80)
    lines = [view.line()]
    view.event({"event": "phase", "text": "正在读取一个名字很长的数据文件" * 5})
    lines.append(view.line())
    assert lines[-1].endswith("0:00")
    assert all(cell_len(line) < width - 2 for line in lines)


def test_text_that_looks_like_markup_stays_text(terminal, tmp_path):
    with LiveView(tmp_path) as view:
        view.event({"event": "checkpoint", "step": 4, "path": "/runs/[red]a[/red]"})
    assert "/runs/[red]a[/red]" in terminal.getvalue()


def test_a_long_path_stays_in_one_piece(terminal, tmp_path):
    path = "/scratch/" + "a-long-folder-name/" * 6 + "checkpoints/step-4"
    with LiveView(tmp_path) as view:
        view.event({"event": "checkpoint", "step": 4, "path": path})
    assert path in terminal.getvalue()


def test_steps_from_before_a_run_was_continued_are_not_told_again():
    meter = Meter()
    meter.plan(total_steps=10, start_step=6)
    line = {"loss": 1.0, "tokens": 10, "seconds": 0.1}
    assert not meter.metrics({**line, "step": 6})
    assert meter.metrics({**line, "step": 7})
    assert meter.step == 7


@pytest.mark.parametrize(
    ("term", "there", "moves"), [("xterm", True, True), ("dumb", True, False), ("xterm", False, False)]
)
def test_a_line_moves_where_the_terminal_can(monkeypatch, term, there, moves):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: there, raising=False)
    assert progress.moves_lines() == moves
