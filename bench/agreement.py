"""dsrun's findings beside what DeepSpeed does with the same configs, drawn at random: a page for docs/.

    python bench/agreement.py [--parsed 20000] [--initialised 300] [--seed N] [--jobs 2] [--minimise]
        [--release 0.16.9 --sources DIR] [--output docs/reference/agreement.md]

Every key of the schema by itself at all kinds of values, and `--parsed` drawn configs are read with DeepSpeedConfig,
as 1 or 2 ranks would; `--initialised` more, that DeepSpeed reads without complaint, train two steps of a small model
on the CPU, each in a process of its own. A config that DeepSpeed stops at has to get an error from dsrun; one that it
takes mustn't get an error that says it stops. With --output the page and bench/results/agreement-<date>.json are
written. Exits 1 where a disagreement has no explanation (bench/oracle/known.py holds those).
--release asks another release than the installed one, whose code is written to --sources; it only reads.
Operators that aren't compiled in $DSRUN_CACHE or $TORCH_EXTENSIONS_DIR are left out; --build compiles the common ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from oracle import compare, draw, reading, training  # noqa: E402
from oracle.compare import Disagreement, Report, Tally  # noqa: E402

from dsrun.data.cache import cache_root  # noqa: E402

RESULTS = CHECKOUT / "bench/results"
CHUNK = 250
COMMON = ("fused_adam", "cpu_adam")
VERDICTS = ("refused", "fails", "differs", compare.SILENT)


def drawn(seed: int, index: int, **how: Any) -> draw.Case:
    """The case of a seed and a number."""
    return draw.draw(Random(f"{seed}/{index}"), **how)


def parse_chunk(asked: tuple[int, int, int]) -> Report:
    """Read and compare the cases of a seed from a first number to a last."""
    seed, first, last = asked
    report = Report()
    for index in range(first, last):
        report.add(compare.compare_reading(drawn(seed, index)))
    return report


def every_key(asked: tuple[int, int]) -> Report:
    """Every so-manyth of the keys by themselves, from a first one on."""
    first, step = asked
    report = Report()
    for case in itertools.islice(draw.singles(), first, None, step):
        report.add(compare.compare_reading(case))
    return report


def alone(jobs: int) -> Report:
    """Every key of the schema by itself, at all kinds of values."""
    report = Report()
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for part in pool.imap(every_key, [(first, jobs) for first in range(jobs)]):
            report.merge(part)
    return report


def parsed(count: int, seed: int, jobs: int) -> Report:
    """Read and compare so many cases, in so many processes."""
    chunks = [(seed, first, min(count, first + CHUNK)) for first in range(0, count, CHUNK)]
    report = Report()
    if not chunks:
        return report
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for part in pool.imap(parse_chunk, chunks):
            report.merge(part)
    return report


def trainable(count: int, seed: int) -> list[draw.Case]:
    """A number of cases that DeepSpeed reads without complaint."""
    found: list[draw.Case] = []
    index = 0
    while len(found) < count:
        case = drawn(seed, index, changes=2, world_sizes=(1,))
        if compare.ask_reading(case).kind == reading.ACCEPTED:
            found.append(case)
        index += 1
    return found


def initialised(count: int, seed: int, jobs: int) -> Report:
    """Train with so many cases, and compare."""
    cases = trainable(count, seed)
    report = Report()
    for done, (index, outcome) in enumerate(training.train_all(cases, jobs=jobs), 1):
        report.add(compare.compare_training(cases[index], outcome))
        if done % 20 == 0:
            print(f"{done}/{count} trained", file=sys.stderr)
    return report


def minimise(report: Report, ask: compare.Ask) -> None:
    """The example of every cause with nothing in it that could be left out."""
    for tally in report.causes.values():
        tally.first = compare.smallest(tally.first, ask)


# --- the page -------------------------------------------------------------------------------------------------------


def table(report: Report) -> list[str]:
    """Outcomes of the configs by dsrun's findings."""
    lines = [f"| DeepSpeed | {' | '.join(VERDICTS)} |", f"| --- {'| --- ' * len(VERDICTS)}|"]
    for outcome, row in sorted(report.table.items()):
        lines.append(f"| {outcome} | {' | '.join(f'{row.get(verdict, 0):,}' for verdict in VERDICTS)} |")
    return [*lines, ""]


def differing(report: Report) -> list[str]:
    """Number of times that each rule said that a config does something else."""
    return [
        "Taken, with an error that says it means something else: " + counted(report.differs),
        "",
        "Stopped at, where no error says that it stops: " + counted(report.milder),
        "",
    ]


def counted(rules: Counter[str]) -> str:
    return ", ".join(f"{rule} {count:,}" for rule, count in rules.most_common()) + "." if rules else "none."


def disagreements(tallies: list[Tally]) -> list[str]:
    """A row for each cause."""
    if not tallies:
        return ["None.", ""]
    lines = [
        "| times | kind | config (ranks) | DeepSpeed | dsrun | why |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for tally in sorted(tallies, key=lambda tally: -tally.count):
        found = tally.first
        cells = [
            found.kind,
            f"`{json.dumps(found.case.config)}` ({found.case.world_size})",
            f"{found.outcome.kind} {found.outcome.text}",
            said(found),
            found.known or "not explained",
        ]
        lines.append(f"| {tally.count} | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return [*lines, ""]


def said(found: Disagreement) -> str:
    """dsrun's findings on one line."""
    verdict = found.verdict
    lines = (
        f"{each.rule} {each.effect or each.severity}: {each.path} {each.message}" for each in verdict.findings
    )
    return verdict.crash or "; ".join(lines) or "nothing"


def page(reports: dict[str, Report], settings: dict[str, Any], seconds: dict[str, float]) -> str:
    """The page for docs/reference."""
    installed = {name: version(name) for name in ("deepspeed", "torch")}
    installed["deepspeed"] = draw.RELEASE or installed["deepspeed"]
    versions = ", ".join(f"{name} {number}" for name, number in installed.items())
    reads, trains = reports["parsed"], reports["initialised"]
    known = [tally for report in reports.values() for tally in report.causes.values() if tally.first.known]
    open_ = [tally for report in reports.values() for tally in report.unexplained]
    return "\n".join(
        [
            "# dsrun beside DeepSpeed, on drawn configs",
            "",
            f"Made by `python bench/agreement.py` on {date.today()}: {versions}, Python {platform.python_version()}, "
            f"{os.cpu_count()} CPU cores, no GPU. Seed {settings['seed']}.",
            "",
            "The configs are drawn: a realistic one, keys of the schema with values that fit, and what people get "
            "wrong (misspelt, moved and outdated keys, values of another type or past the edge, sections that don't "
            "go together). The columns hold the gravest error that dsrun finds: `refused` says that DeepSpeed stops "
            "while it reads the config, `fails` that it stops later, `differs` that it trains and does something "
            "else.",
            "",
            f"## One key: {sum(sum(row.values()) for row in reports['keys'].table.values()):,} configs",
            "",
            "Every key of the schema by itself, at its bounds, its choices and values that are none, read by "
            f"DeepSpeedConfig in {seconds['keys']:.0f} s.",
            "",
            *table(reports["keys"]),
            *differing(reports["keys"]),
            f"## Read: {settings['parsed']:,} configs",
            "",
            f"By DeepSpeedConfig, as one or two ranks would, in {seconds['parsed']:.0f} s. Where it stops, the keys "
            "that aren't needed for that are taken away, and dsrun has to find an error in what is left.",
            "",
            *table(reads),
            *differing(reads),
            f"## Trained: {settings['initialised']:,} configs",
            "",
            "Those that DeepSpeed reads without complaint: `deepspeed.initialize` and two optimizer steps of a small "
            f"model on one CPU rank, in {seconds['initialised']:.0f} s. `unable`: something isn't installed, compiled "
            "or there on this machine; `slow`: not done in time; `not finite`: the loss.",
            "",
            *table(trains),
            *differing(trains),
            "## Disagreements that are explained",
            "",
            *disagreements(known),
            "## Disagreements without an explanation",
            "",
            *disagreements(open_),
        ]
    )


def record(reports: dict[str, Report], settings: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    """The results as data."""
    versions = {name: version(name) for name in ("deepspeed", "torch", "pydantic")}
    return {
        "date": str(date.today()),
        "versions": {**versions, "Python": platform.python_version()},
        "settings": settings,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        **{
            name: {
                "table": report.table,
                "differs": report.differs,
                "milder": report.milder,
                "disagreements": [
                    {
                        "count": tally.count,
                        "kind": tally.first.kind,
                        "cause": tally.first.cause,
                        "config": tally.first.case.config,
                        "world_size": tally.first.case.world_size,
                        "changes": tally.first.case.how,
                        "deepspeed": f"{tally.first.outcome.kind} {tally.first.outcome.text}",
                        "dsrun": said(tally.first),
                        "known": tally.first.known,
                    }
                    for tally in sorted(report.causes.values(), key=lambda tally: -tally.count)
                ],
            }
            for name, report in reports.items()
        },
    }


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parsed", type=int, default=20000)
    parser.add_argument("--initialised", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minimise", action="store_true", help="leave out of each example what isn't needed")
    parser.add_argument("--build", action="store_true", help="compile the operators that are missing")
    parser.add_argument("--release", help="a release of DeepSpeed other than the installed one")
    parser.add_argument("--sources", type=Path, help="where the code of releases is written to")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def compare_all(given: argparse.Namespace) -> tuple[dict[str, Report], dict[str, float]]:
    """The reports, and the seconds that each took."""
    reports, seconds = {}, {}

    def timed(name: str, work: Callable[[], Report], ask: compare.Ask) -> None:
        began = time.perf_counter()
        reports[name] = work()
        seconds[name] = time.perf_counter() - began
        if given.minimise:
            minimise(reports[name], ask)

    timed("keys", lambda: alone(given.jobs) if given.parsed else Report(), compare.ask_reading)
    timed("parsed", lambda: parsed(given.parsed, given.seed, given.jobs), compare.ask_reading)
    if given.initialised:
        training.prepare(cache_root(), build=COMMON if given.build else ())
    timed("initialised", lambda: initialised(given.initialised, given.seed, given.jobs), training.train)
    return reports, seconds


def _start_again(given: argparse.Namespace) -> None:
    """Go on as a process that imports the named release."""
    from oracle import releases

    place = releases.unpacked(
        given.release, given.sources or Path(tempfile.gettempdir(), "deepspeed-releases")
    )
    words = [sys.executable, __file__, *sys.argv[1:], "--initialised", "0"]
    os.execve(sys.executable, words, releases.environment(place))


def main() -> None:
    """Compare, print, write, and fail where a disagreement has no explanation."""
    given = options()
    if given.release and given.release != draw.RELEASE:
        _start_again(given)
    reading.load()
    compare.judge(draw.Case({}, 1))  # the rules are loaded here, and the same for every process
    reports, seconds = compare_all(given)
    settings = {name: getattr(given, name) for name in ("parsed", "initialised", "seed")}
    text = page(reports, settings, seconds)
    print(text)
    if given.output:
        given.output.write_text(text, encoding="utf-8")
        data = json.dumps(record(reports, settings, seconds), ensure_ascii=False, indent=1)
        (RESULTS / f"agreement-{date.today()}.json").write_text(data + "\n", encoding="utf-8")
    if count := sum(len(report.unexplained) for report in reports.values()):
        raise SystemExit(f"{count} kinds of disagreement without an explanation")


if __name__ == "__main__":
    main()
