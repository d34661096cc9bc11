"""The display of a fine-tune: one calm line that moves, and a line for each thing worth keeping."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dsrun.job.layout import EVENTS, METRICS
from dsrun.job.run_folder import Follower
from dsrun.words import clock, counted

PLAIN_EVERY_S = 10.0
SPEED_WINDOW = 20
BAR, SHORT_BAR = 16, 8
MARGIN = 4
"""Columns that the moving line leaves free: a ^C that the terminal shows there must not break it into two."""
RECURRING = {"training", "evaluating", "copying a checkpoint", "writing a checkpoint"}
"""Phases that come again and again; a moving line shows them, a log has the lines that they lead to."""


class Meter:
    """Turns metrics into the words of the progress line. Numbers only; knows nothing of terminals."""

    def __init__(self) -> None:
        self.total_steps = self.step = self._start = 0
        self._speeds: deque[tuple[int, float]] = deque(maxlen=SPEED_WINDOW)
        self._last: dict[str, Any] = {}

    def plan(self, total_steps: int, start_step: int) -> None:
        """Begin with these totals."""
        self.total_steps, self.step, self._start = total_steps, start_step, start_step

    def metrics(self, line: dict[str, Any]) -> bool:
        """Take a metrics line in; True if it was a training step, and not one from before the run was continued.

        What comes before the plan is of the run's earlier part: the file is written anew when it goes on.
        """
        if "loss" not in line or not self.total_steps or line["step"] <= self._start:
            return False
        self.step = line["step"]
        self._last = line
        self._speeds.append((line["tokens"], line["seconds"]))
        return True

    @property
    def tokens_per_s(self) -> float:
        """Tokens (without padding) per second over the last steps, all ranks together."""
        return sum(tokens for tokens, _ in self._speeds) / max(
            1e-9, sum(seconds for _, seconds in self._speeds)
        )

    @property
    def seconds_left(self) -> float:
        """Training time left at the speed of the last steps."""
        per_step = sum(seconds for _, seconds in self._speeds) / max(1, len(self._speeds))
        return per_step * (self.total_steps - self.step)

    def text(self, width: int | None = None) -> str:
        """The progress line; in `width` columns, without what matters least."""
        line = self._last
        parts = {
            "step": f"step {self.step}/{self.total_steps}",
            "loss": f"loss {_loss_text(line['loss'])}",
            "speed": f"{self.tokens_per_s:,.0f} tokens/s",
        }
        if line.get("loss_scale") is not None:
            parts |= {"scale": f"scale {line['loss_scale']:g}", "skipped": f"skipped {line['skipped']}"}
        parts |= {
            "memory": f"{line['memory_bytes'] / 2**30:.2f} GiB",
            "left": f"{clock(self.seconds_left)} left",
        }
        for name in ("memory", "scale", "skipped", "speed"):
            if width is not None and len("  ".join(parts.values())) > width:
                parts.pop(name, None)
        return "  ".join(parts.values())


def _loss_text(loss: float | None) -> str:
    """A loss in a line. None: JSON has no NaN and no infinity."""
    return "not finite" if loss is None else f"{loss:.4f}"


def cut(text: str, width: int) -> str:
    """A text in at most `width` columns; Chinese characters take two."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else f"{set_cell_size(text, max(0, width - 1)).rstrip()}…"


class PlainView(AbstractContextManager["PlainView"]):
    """Lines for a log file or a pipe: what a fine-tune's first rank writes, its progress every ten seconds.

    Called again and again; tells what is new since it was made, and returns whether anything was.
    """

    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        self.say, self.meter, self._told_at = say, Meter(), 0.0
        self._events = Follower(run_dir / EVENTS, from_end=True)
        self._metrics = Follower(run_dir / METRICS, from_end=True)

    def __exit__(self, *_: object) -> None:
        """Nothing to clear up."""

    def __call__(self) -> bool:
        events, metrics = self._events.lines(), self._metrics.lines()  # no event is read before an older step
        new = sorted([*metrics, *events], key=lambda line: line.get("time", 0.0))
        for line in new:
            if "event" in line:
                self.event(line)
            else:
                self.metrics(line)
        return bool(new)

    def event(self, event: dict[str, Any]) -> None:
        """A phase, an evaluation, a checkpoint, ..."""
        if event["event"] == "plan":
            self.meter.plan(event["total_steps"], event["start_step"])
        text = describe_event(event)
        if text and text not in RECURRING:
            self.say(text)

    def metrics(self, line: dict[str, Any]) -> None:
        """A training step."""
        now = time.monotonic()
        last = line["step"] == self.meter.total_steps
        if self.meter.metrics(line) and (now - self._told_at >= PLAIN_EVERY_S or last):
            self.say(self.meter.text())
            self._told_at = now


def moves_lines() -> bool:
    """Whether stderr is a terminal that can move a line. On one without that (TERM=dumb) rich would draw nothing."""
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class LiveView(PlainView):
    """One line that moves at the bottom of a terminal, with what is worth keeping above it.

    A phase has a clock beside it: what takes long (compiling, loading) is seen to go on.
    """

    def __init__(self, run_dir: Path) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._phase, self._since = "starting", time.monotonic()
        self._console = console = Console(stderr=True, highlight=False)
        self._live = Live(
            console=console, refresh_per_second=5, transient=True,
            get_renderable=lambda: Text(self.line(), no_wrap=True, overflow="ellipsis"),
        )  # fmt: skip
        super().__init__(run_dir, lambda text: console.print(text, markup=False, soft_wrap=True))

    def line(self) -> str:
        """The line as it is now; a step's where there is no phase. Shorter than the terminal is wide."""
        width = self._console.width - MARGIN
        if self._phase:
            clocked = f"  {clock(time.monotonic() - self._since)}"
            return f"{cut(self._phase, width - len(clocked))}{clocked}"
        text = self.meter.text(width)
        length = min(BAR, width - len(text) - 3)
        done = round(length * self.meter.step / max(1, self.meter.total_steps))
        return f"{text}  {'━' * done}╺{'─' * (length - done)}" if length >= SHORT_BAR else text

    def __enter__(self) -> LiveView:
        self._phase, self._since = "starting", time.monotonic()
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def event(self, event: dict[str, Any]) -> None:
        """Phases move in the line; the rest stays above it."""
        if event["event"] == "phase":
            self._phase, self._since = event["text"], time.monotonic()
        else:
            super().event(event)

    def metrics(self, line: dict[str, Any]) -> None:
        """A training step."""
        if self.meter.metrics(line):
            self._phase = ""


def describe_event(event: dict[str, Any]) -> str:
    """An event in a line; empty for what need not be said."""
    kind = event["event"]
    if kind in ("phase", "note"):
        return str(event["text"])
    if kind == "plan":
        start = f", from step {event['start_step']}" if event["start_step"] else ""
        return (
            f"{counted(event['total_steps'], 'step')} of {counted(event['step_rows'], 'row')}{start}: "
            f"{counted(event['train_rows'], 'training row')}, {counted(event['eval_rows'], 'evaluation row')}"
        )
    if kind == "eval":
        perplexity = event.get("perplexity")
        more = f", perplexity {perplexity:,.2f}" if perplexity is not None else ""
        return f"step {event['step']}: evaluation loss {_loss_text(event['loss'])}{more}"
    if kind == "best":
        return f"step {event['step']}: the lowest evaluation loss so far, kept in {event['path']}"
    if kind == "checkpoint":
        return f"step {event['step']}: checkpoint {event['path']}"
    if kind == "scores":
        scores = "  ".join(f"{name.upper()} {value:.2f}" for name, value in event["scores"].items())
        when = event["when"]
        when = f"{when} training" if when in ("before", "after") else f"at {when}"
        return f"{counted(event['rows'], 'prompt')} answered {when}: {scores}"
    return ""
