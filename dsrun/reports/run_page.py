"""The content of a run's page: read from its folder, in words and numbers, before anything is drawn or written.

A folder is taken as it is. One that past_runs can't read (another version's, half written, damaged) has a page all the
same, with why, and with what its metrics still tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from dsrun.errors import DAMAGE, UnfitFileError
from dsrun.job.job import Job, devices_text
from dsrun.job.layout import DATA_REPORT, EVENTS, METRICS
from dsrun.job.run_folder import COMMAND, CONFIG, ENVIRONMENT, JOB, json_object, json_objects
from dsrun.jobs.runs import past_runs
from dsrun.jobs.runs.metrics_file import StepColumns, read_bytes
from dsrun.jobs.runs.outcome import AFTER, Answer, answers
from dsrun.jobs.runs.past_runs import WORSE, Run
from dsrun.jobs.runs.run_details import next_commands
from dsrun.jobs.runs.run_summaries import Summary, planned_bytes, summary
from dsrun.reports import figures, sections
from dsrun.reports.figures import Figure
from dsrun.reports.sections import SettingRow
from dsrun.words import counted, gib_text, loss_text, span_text, time_text

T = TypeVar("T")
KINDS = {
    "finished": "good", "running": "live", "preparing": "live", "failed": "bad", "interrupted": "warn",
    "stopped": "warn", "broken": "bad",
}  # fmt: skip
"""First word of a state -> how a page shows it."""
MOST_ANSWERS = 12
"""Answers that a page shows, at most."""


@dataclass(frozen=True)
class Tile:
    """A number that a reader looks for first."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class RunPage:
    """Everything that a page of a run shows. A field is empty where the run has nothing for it."""

    name: str
    path: str
    state: str
    why: str = ""
    subtitle: str = ""
    tiles: Sequence[Tile] = ()
    problems: Sequence[str] = ()
    diagnosis: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[Figure] = ()
    ranks: Sequence[Sequence[str]] = ()
    """Rows of sections.RANK_HEAD."""
    ranks_note: str = ""
    data: Sequence[Sequence[str]] = ()
    """Rows of sections.DATA_HEAD."""
    data_notes: Sequence[str] = ()
    first_example: str = ""
    scores: Sequence[Sequence[str]] = ()
    answers: Sequence[Answer] = ()
    config: Sequence[SettingRow] = ()
    settings: Sequence[SettingRow] = ()
    events: Sequence[tuple[str, str]] = ()
    commands: Mapping[str, str] = field(default_factory=dict)
    command_text: str = ""
    environment: Sequence[SettingRow] = ()

    @property
    def kind(self) -> str:
        """The look of its state: good, live, bad, warn or quiet."""
        return kind_of(self.state)

    @property
    def alive(self) -> bool:
        """Whether something is still coming."""
        return self.kind == "live"


def kind_of(state: str) -> str:
    """The look of a state: good, live, bad, warn or quiet."""
    return "warn" if state == WORSE else KINDS.get(state.partition(":")[0], "quiet")


def page_of(path: Path, name: str, columns: StepColumns | None = None, by: str = "step") -> RunPage:
    """The page of a run; parts that can't be read say why. Raises DsrunError only where charts can't be drawn.

    columns: its metrics, where somebody keeps them; by: the axis of curves (figures.AXES).
    """
    columns, damaged = columns or StepColumns(path), Damages()
    damaged.unless(columns.read, columns, METRICS)
    line = summary(path, name)
    events: list[dict[str, Any]] = damaged.unless(lambda: json_objects(read_bytes(path, EVENTS)), [], EVENTS)
    drawn: list[Figure] = damaged.unless(lambda: figures.of_training(columns, events, by), [], METRICS)
    # A run that can't be read as one still has a page: its curves and its config may be whole.
    if line.problem is not None:
        config: list[SettingRow] = damaged.unless(
            lambda: sections.settings(json_object(read_bytes(path, CONFIG)), {}), [], CONFIG
        )
        return RunPage(
            name=name, path=str(path), state=line.state, problems=[line.problem, *damaged.faults], figures=drawn,
            config=config,
        )  # fmt: skip
    run = past_runs.read(path)
    page = replace(_of_any(run, line, events, damaged), figures=[] if run.script else drawn)
    page = page if run.script else _of_finetune(page, run, line, columns, damaged)
    return replace(page, problems=[*page.problems, *damaged.faults])


def _of_any(run: Run, line: Summary, events: Sequence[Mapping[str, Any]], damaged: Damages) -> RunPage:
    """The page with the parts that every run has, a script's among them."""
    job = run.any_job
    parts = [
        line.model or "",
        *([f"preset {job.preset}"] if job.preset else []),
        *([job.division] if isinstance(job, Job) else []),
        counted(job.world_size, "rank"),
    ]
    environment: dict[str, Any] = damaged.unless(lambda: run.environment, {}, ENVIRONMENT)
    command = damaged.unless(lambda: read_bytes(run.path, COMMAND), b"", COMMAND)
    page = RunPage(
        name=line.name,
        path=str(run.path),
        state=run.state_text,
        why=run.why,
        subtitle=" · ".join([*parts, job.accelerator.upper(), devices_text(job.hosts)]),
        tiles=[_time_tile(line)],
        diagnosis=damaged.unless(lambda: sections.diagnosis(run), {}, "the diagnosis"),
        config=damaged.unless(
            lambda: sections.settings(job.ds_config or {}, sections.origins(job, "config")), [], "the config"
        ),
        settings=damaged.unless(lambda: sections.of_job(job), [], JOB),
        events=damaged.unless(lambda: sections.happened(events), [], EVENTS),
        commands=next_commands(run),
        command_text=command.decode("utf-8", "replace"),
        environment=damaged.unless(lambda: sections.environment(environment), [], ENVIRONMENT),
        ranks=damaged.unless(lambda: sections.ranks(run), [], "state/"),
        ranks_note=damaged.unless(lambda: sections.ranks_note(run), "", "state/"),
    )
    return replace(page, problems=damaged.unless(lambda: run.problems, [], "state/"))


def _of_finetune(page: RunPage, run: Run, line: Summary, columns: StepColumns, damaged: Damages) -> RunPage:
    """The page with the parts of a fine-tune: curves, memory beside the plan, data, answers."""
    job = run.job
    data: dict[str, Any] = damaged.unless(
        lambda: json_object(read_bytes(run.path, DATA_REPORT)), {}, DATA_REPORT
    )
    train = data.get("train") if isinstance(data.get("train"), dict) else {}
    on_gpu = job.accelerator == "cuda"
    memory = damaged.unless(
        lambda: figures.of_memory(sections.peaks(run, on_gpu=on_gpu), planned_bytes(job), on_gpu=on_gpu),
        None,
        "state/",
    )
    lengths = damaged.unless(lambda: figures.of_lengths(train or {}), None, DATA_REPORT)
    return replace(
        page,
        tiles=[*_tiles(line, columns), *_slow_tiles(run), *page.tiles],
        figures=[*page.figures, *filter(None, (memory, lengths))],
        data=damaged.unless(lambda: sections.data_files(data), [], DATA_REPORT),
        data_notes=damaged.unless(lambda: sections.data_notes(data), [], DATA_REPORT),
        first_example=damaged.unless(lambda: sections.first_example(data), "", DATA_REPORT),
        scores=sections.scores(run),
        answers=damaged.unless(lambda: answers(run.path, MOST_ANSWERS), [], AFTER),
    )


class Damages:
    """Faults of a run's files: a page lists them, and shows the rest."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def unless(self, make: Callable[[], T], otherwise: T, name: str) -> T:
        """The result of `make`; `otherwise` where a file holds something else than it should."""
        try:
            return make()
        except UnfitFileError as error:
            self.faults += [f"{name} {problem.what}" for problem in error.problems]
        except DAMAGE as error:
            self.faults.append(f"{name} is damaged: {type(error).__name__}: {error}")
        except OSError as error:
            self.faults.append(f"{name} can't be read: {error.strerror}")
        return otherwise


def _tiles(line: Summary, columns: StepColumns) -> list[Tile]:
    """The numbers of a fine-tune that a reader looks for first."""
    total = "?" if line.total_steps is None else f"{line.total_steps:,}"
    losses = [value for value in columns.columns["loss"] if isfinite(value)]
    began = f"from {loss_text(losses[0])}" if losses else ""
    evals = sorted(columns.evals.items())
    loss = "not finite" if line.loss is not None and not isfinite(line.loss) else loss_text(line.loss)
    tiles = [Tile("Step", f"{line.steps or 0:,}", f"of {total}"), Tile("Loss", loss, began)]
    if evals:
        tiles.append(Tile("Evaluation loss", loss_text(evals[-1][1]), f"from {loss_text(evals[0][1])}"))
    if line.score:
        name = line.score.name
        tiles.append(Tile(name[0].upper() + name[1:], f"{line.score.value:.2f}", line.score.beside))
    if line.tokens_per_second:
        tiles.append(Tile("Tokens a second", f"{line.tokens_per_second:,.0f}", "over the last steps"))
    if line.memory_bytes is not None:
        planned = f"planned {gib_text(line.planned_bytes)}" if line.planned_bytes else "of rank 0"
        tiles.append(Tile("Memory, rank 0", gib_text(line.memory_bytes), planned))
    return tiles


def _slow_tiles(run: Run) -> list[Tile]:
    """The ranks or the host that the others wait for."""
    if run.health is None or not run.health.slow:
        return []
    ranks = ", ".join(map(str, run.health.slow))
    return [Tile("Slow", f"host {run.health.host}" if run.health.host else f"rank {ranks}", run.health.words)]


def _time_tile(line: Summary) -> Tile:
    """The time that is left, or that the run has taken."""
    if line.seconds_left is not None:
        return Tile("Time left", span_text(line.seconds_left), f"{span_text(line.seconds)} so far")
    return Tile("Time", span_text(line.seconds), f"started {time_text(line.started)}")
