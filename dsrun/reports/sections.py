"""The tables of a run's page: its ranks, data, answers, config and settings, what happened, what it ran with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dsrun.config import tree
from dsrun.host.hiding import shown_arguments, shown_value
from dsrun.job.job import AnyJob, Job, ScriptJob
from dsrun.jobs.diagnosis import run_logs
from dsrun.jobs.diagnosis.diagnosis import Diagnosis
from dsrun.jobs.launchers.common.environment import COMPUTING
from dsrun.jobs.runs.metrics_file import has, number, value_of
from dsrun.jobs.runs.past_runs import Run
from dsrun.jobs.supervision.display.progress import RECURRING, describe_event
from dsrun.words import gib_text, marked, time_text

RANK_HEAD = ("rank", "host", "state", "GPU allocated", "GPU reserved", "host memory")
DATA_HEAD = ("file", "format", "weight", "rows", "tokens", "left out")
MOST_RANKS = 64
"""Ranks in a table, at most."""
MOST_EVENTS = 60
"""Lines of what happened, at most: the first and the last ones."""
NOT_LISTED = ("ds_config", "prepared", "prediction", "origins", "hosts", "format", "run_dir", "kind")
"""Fields of job.json that a page shows in another form, or that say nothing to people."""


@dataclass(frozen=True)
class SettingRow:
    """A key with its value, and who gave it."""

    key: str
    value: str
    origin: str = ""


def diagnosis(run: Run) -> Mapping[str, Any]:
    """The diagnosis of a run: its own, or that of its logs where it had no time to write one. Empty where nothing
    died."""
    if run.diagnosis:  # one of another version may have other keys
        return {field.name: run.diagnosis.get(field.name) for field in fields(Diagnosis)}
    if run.alive or run.state.startswith(("finished", "not started", "stopped")):
        return {}
    verdict = run_logs.of_run(run.path, said="\n".join(run.problems))
    return asdict(verdict) if verdict.cause else {}


def origins(job: AnyJob, what: str) -> Mapping[str, str]:
    """The origin of each value of the "config" or the "options"; empty for a script, whose job doesn't have it."""
    return job.origins.get(what, {}) if isinstance(job, Job) else {}


def settings(values: Mapping[str, Any], by: Mapping[str, str]) -> list[SettingRow]:
    """Nested values, a row for each; what a key's name marks as secret is hidden."""
    return [
        SettingRow(
            path,
            _text(shown_value(path, value)),
            by.get(path, by.get(path.rpartition(".")[2], "")),
        )
        for path, value in tree.leaves(values)
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def of_job(job: AnyJob) -> list[SettingRow]:
    """The fields of job.json besides the config, with the options that gave them."""
    values = {name: value for name, value in asdict(job).items() if name not in NOT_LISTED}
    if isinstance(job, ScriptJob):
        values["args"] = shown_arguments(job.args)
    return settings(values, origins(job, "options"))


def happened(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Time and text of each event; phases that come again and again are left out."""
    rows = []
    for event in events:
        text = _described(event)
        if text and text not in RECURRING:
            rows.append((time_text(event["time"] if has(event, "time") else None), text))
    if len(rows) > MOST_EVENTS:
        between = ("", f"... {len(rows) - MOST_EVENTS:,} more ...")
        rows = [*rows[: MOST_EVENTS // 2], between, *rows[-MOST_EVENTS // 2 :]]
    return rows


def _described(event: Mapping[str, Any]) -> str:
    """An event in a line; one that another dsrun wrote, or that was cut, by its name alone."""
    try:
        return describe_event(dict(event))
    except (KeyError, TypeError, ValueError, AttributeError):
        return str(event.get("event", ""))


def ranks(run: Run) -> list[list[str]]:
    """A row of RANK_HEAD for each rank that has written its state."""
    rows = []
    for state in run.ranks[:MOST_RANKS]:
        peaks = state.get("peaks") if isinstance(state.get("peaks"), Mapping) else {}
        sizes = [
            gib_text(value_of(peaks or {}, name))
            for name in ("gpu_allocated_bytes", "gpu_reserved_bytes", "host_peak_bytes")
        ]
        rows.append([str(state.get("rank", "?")), str(state.get("host", "")), _status(state, run), *sizes])
    return rows


def _status(state: Mapping[str, Any], run: Run) -> str:
    """A rank's status; one that was killed has left "running"."""
    status = str(state.get("status", ""))
    return "gone" if status == "running" and not run.alive else status


def ranks_note(run: Run) -> str:
    """The note on ranks that the table leaves out."""
    return f"The first {MOST_RANKS} of {len(run.ranks):,} ranks." if len(run.ranks) > MOST_RANKS else ""


def peaks(run: Run, *, on_gpu: bool) -> Iterator[Mapping[str, Any]]:
    """The peak of each rank that has written it: {"rank", "bytes"}."""
    name = "gpu_allocated_bytes" if on_gpu else "host_peak_bytes"
    for state in run.ranks:
        sizes = state.get("peaks")
        if isinstance(sizes, Mapping) and has(sizes, name):
            yield {"rank": state.get("rank"), "bytes": sizes[name]}


def data_files(report: Mapping[str, Any]) -> list[list[str]]:
    """A row of DATA_HEAD for each file of data.json."""
    parts = [
        (part, report_of)
        for part in ("train", "eval")
        for report_of in (report.get(part) or {}).get("files", ())
    ]
    return [
        [
            str(report_of["file"]) + (" (held out)" if part == "eval" else ""), str(report_of["format"]),
            f"{report_of['weight']:g}", f"{report_of['rows']:,}", f"{report_of['tokens']:,}",
            f"{report_of['left_out']:,}",
        ]
        for part, report_of in parts
    ]  # fmt: skip


def data_notes(report: Mapping[str, Any]) -> list[str]:
    """Lengths in words, and what was cut or left out."""
    train = report.get("train")
    if not isinstance(train, Mapping):
        return []
    marks = train.get("percentiles") or {}
    texts = [f"{share} % up to {length:,}" for share, length in marks.items() if number(length)]
    notes = [f"Tokens of a row: {', '.join(texts)}; the longest {train['longest']:,}."] if texts else []
    if number(train.get("target_tokens")):
        notes.append(
            f"{train['target_tokens']:,} of {train['tokens']:,} tokens are trained on ({train['trained_on']})."
        )
    if train.get("truncated"):
        notes.append(f"{100 * train['truncated']:.1f} % of the rows were cut to fit.")
    notes += [f"{count:,} rows left out: {why}." for why, count in (train.get("dropped") or {}).items()]
    return notes


def first_example(report: Mapping[str, Any]) -> str:
    """The first training example as the model saw it, what is trained on in double brackets; empty: none is kept."""
    train = report.get("train")
    samples = train.get("samples") if isinstance(train, Mapping) else None
    return marked(samples[0]) if samples else ""


def scores(run: Run) -> list[list[str]]:
    """A row for each score: its name, and its value at each time it was taken. The first row is the head."""
    by_time = run.scores
    if not by_time:
        return []
    names = dict.fromkeys(name for values in by_time.values() for name in values)
    rows = [
        [name.upper(), *(f"{values[name]:.2f}" if name in values else "-" for values in by_time.values())]
        for name in names
    ]
    return [["score", *by_time], *rows]


def environment(facts: Mapping[str, Any]) -> list[SettingRow]:
    """The run's environment: Python, packages, GPUs, the commit."""
    git = facts.get("git") if isinstance(facts.get("git"), Mapping) else {}
    gpus = [f"{gpu['name']} ({gib_text(gpu['memory_bytes'])})" for gpu in facts.get("gpus") or ()]
    changed = len((git or {}).get("changed") or ())
    rows = {
        "host": facts.get("host"),
        "platform": facts.get("platform"),
        "python": str(facts.get("python") or "").partition(" ")[0],
        **{name: number for name, number in (facts.get("packages") or {}).items() if name in COMPUTING},
        "CPU cores": facts.get("cpu_cores"),
        "GPUs": ", ".join(gpus),
        "commit": (git or {}).get("commit"),
        "files changed since": changed or None,
        **(facts.get("variables") or {}),
    }
    return [SettingRow(name, str(shown_value(name, value))) for name, value in rows.items() if value]
