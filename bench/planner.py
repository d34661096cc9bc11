"""dsrun's planner beside what was measured and published, and beside the estimators that people use today.

    python bench/planner.py [--cases FILE]... [--traced] [--json] [--write]

For every case of bench/published/cases.json (or of another file in that format; bench/published/README.md has the
fields): the GPU memory that dsrun predicts, that DeepSpeed's estimate_zero2/3_model_states_mem_needs, accelerate's
estimate_training_usage and fitcheck-llm give, each called in this run, and what was measured. Then the median and the
90th percentile of the relative errors, and how often each is right about what fits. A row with a word that is not in
the language is listed under `refused`, and the exit code is 1. --traced scores dsrun's trace beside its formulas: a
recording of each network takes some seconds, once. --json prints all of it as data; --write does both, and makes
docs/reference/planner-accuracy.md, bench/results/planner-<date>.json and presets/accuracy/published.toml.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from published import peers, reading, scoring, tracing  # noqa: E402
from published.scoring import GROUPS, TOOLS, TRACE, Row, Score  # noqa: E402

from dsrun.planner.gpu_memory import FIXED_LENGTHS, HELD_AT_END, REUSED, VARIABLE_LENGTHS  # noqa: E402
from dsrun.planner.plan import ERROR, STUCK, TIGHT, TIGHT_FROM, chance  # noqa: E402

PAGE = CHECKOUT / "docs/reference/planner-accuracy.md"
RESULTS = CHECKOUT / "bench/results"
ACCURACY = CHECKOUT / "presets/accuracy/published.toml"
NAMES = {
    "dsrun": "dsrun", "deepspeed": "DeepSpeed", "accelerate": "accelerate", "fitcheck": "fitcheck-llm",
}  # fmt: skip


def percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.1%}".replace("%", " %")


def gib(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def summary(rows: Sequence[Row]) -> list[str]:
    """A line for each group of rows and each tool that answers there."""
    lines = [
        "| rows | tool | n | median error | 90th percentile | without any one source |",
        "| --- " * 6 + "|",
    ]
    for group, belongs in GROUPS.items():
        chosen = [row for row in rows if belongs(row)]
        for tool in TOOLS:
            found = scoring.score(chosen, tool)
            if found.n:
                left = scoring.without_one_source(chosen, tool)
                lines.append(
                    f"| {group} | {NAMES[tool]} | {found.n} | {percent(found.median)} | {percent(found.p90)} | "
                    f"at most {percent(left.median)}, {percent(left.p90)} |"
                )
    return [*lines, ""]


def fitting(rows: Sequence[Row]) -> list[str]:
    """Number of times that each tool is right about what fits."""
    lines = ["| runs | tool | right | of those that ran | of those that didn't |", "| --- " * 5 + "|"]
    full = [row for row in rows if row.full]
    for name, chosen, tools in (("full fine-tuning", full, TOOLS), ("all", rows, TOOLS[:1])):
        for tool in tools:
            counts = [scoring.verdicts(chosen, tool, fits) for fits in (None, True, False)]
            cells = " | ".join(f"{right} of {asked}" for right, asked in counts)
            lines.append(f"| {name} | {NAMES[tool]} | {cells} |")
    judged = scoring.judged(rows)
    tight = sum(scoring.word(row) == TIGHT for row in judged)
    lines += [
        "",
        f"{tight} of {len(judged)} are called tight.",
        "",
        "| chance, as said | runs | ran |",
        "| --- " * 3 + "|",
    ]
    lines += [
        f"| {low:.0%} to {min(high, 1):.0%} | {count} | {ran} |".replace("%", " %")
        for low, high, count, ran in scoring.calibration(rows)
    ]
    told = [
        ran
        for used, ran in ((chance(row.used or 0.0), row.case["fits"]) for row in judged)
        if 0.6 <= used < 0.95
    ]
    lines += [
        "",
        f"Of {len(told)} runs that were told 60 to 95 %, {sum(map(bool, told))} ran.",
    ]
    wrong = [
        f"`{row.case['id']}` ({'ran' if row.case['fits'] else 'did not run'})"
        for row in rows
        if row.verdict("dsrun") is False and not row.held
    ]
    return [*lines, "", f"dsrun is wrong about: {', '.join(wrong) or 'none'}.", ""]


def others(rows: Sequence[Row]) -> list[str]:
    """Seconds of a step and main memory, where they were published."""
    paced, hosted = scoring.paces(rows), scoring.hosts(rows)
    factors = [max(row.pace, 1 / row.pace) for row in rows if row.pace and not row.held]
    within = sum(factor <= 2 for factor in factors) / max(1, len(factors))
    return [
        f"Seconds of a step, {paced.n} runs: within a factor of {paced.median or 0:.2f} in the median, "
        f"{paced.p90 or 0:.2f} at the 90th percentile; {percent(within)} within 2.",
        "",
        f"Main memory of a node, {hosted.n} runs: median error {percent(hosted.median)}, 90th percentile "
        f"{percent(hosted.p90)}.",
        "",
    ]


def measured(rows: Sequence[Row]) -> list[str]:
    """A line for each measurement."""
    lines = [
        "| case | read | measured, GiB | dsrun | error | its peak "
        + "".join(f"| {NAMES[tool]} | error " for tool in TOOLS[1:])
        + "| notes |",
        "| --- " * 13 + "|",
    ]
    for row in rows:
        if row.measured_gib is None:
            continue
        own = [gib(row.said.get("dsrun")), percent(row.error("dsrun"), "+"), row.moment]
        others = [
            text for tool in TOOLS[1:] for text in (gib(row.said.get(tool)), percent(row.error(tool), "+"))
        ]
        doubt = [f"**not scored**: {row.case.get('notes') or 'doubtful'}"] if row.held else []
        cells = [
            str(row.case.get("id")), str(row.case["metric"]), gib(row.measured_gib), *own, *others,
            "; ".join([*doubt, *row.notes]).replace("|", "\\|"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def unread(rows: Sequence[Row]) -> list[str]:
    """The cases without a prediction."""
    return [f"- `{one['id']}`: {one['reason']}" for one in scoring.refused(rows)] or ["None."]


def classes(rows: Sequence[Row]) -> list[str]:
    """Errors by class, what torch allocates and what nvidia-smi shows apart; chances and seconds in a line each."""
    lines = ["| class | n | median error | its sign | 90th percentile |", "| --- " * 5 + "|"]
    lines += [
        f"| {name} | {found.n} | {percent(found.median)} | {percent(signed, '+')} | {percent(found.p90)} |"
        for name, (found, signed) in scoring.by_class(rows).items()
        if found.n
    ]
    if (square := scoring.brier(rows)) is not None:
        lines += ["", f"Brier score of the chances: {square:.3f}."]
    for name, belongs in scoring.PACED.items():
        if (found := scoring.paces([row for row in rows if belongs(row)])).n:
            lines += [
                "",
                f"Seconds, {name}: {found.n} runs, {found.median:.2f} times or less in the median, "
                f"{found.p90:.2f} at the 90th percentile.",
            ]
    return [*lines, ""]


def traced(rows: Sequence[Row]) -> list[str]:
    """The same rows by formula and by trace, class by class; their verdicts; why others have no trace."""
    both = [row for row in rows if TRACE in row.said]
    lines = [
        f"{len(both)} of {len(rows)} cases can be traced.",
        "",
        "| class | n | formula: median, 90th percentile, sign | trace: median, 90th percentile, sign |",
        "| --- " * 4 + "|",
    ]
    scores = [scoring.by_class(both, tool) for tool in ("dsrun", TRACE)]
    for name in scoring.CLASSES:
        cells = [
            f"{percent(found.median)}, {percent(found.p90)}, {percent(signed, '+')}"
            for found, signed in (score[name] for score in scores)
        ]
        if n := scores[0][name][0].n:
            lines.append(f"| {name} | {n} | {' | '.join(cells)} |")
    lines += [
        "",
        "| what fits | right | of those that ran | of those that didn't | Brier score |",
        "| --- " * 5 + "|",
    ]
    for name, tool in (("formula", "dsrun"), ("trace", TRACE)):
        counts = [scoring.verdicts(both, tool, fits) for fits in (None, True, False)]
        cells = [f"{right} of {asked}" for right, asked in counts]
        lines.append(f"| {name} | {' | '.join(cells)} | {scoring.brier(both, tool) or 0:.3f} |")
    reasons = Counter(row.untraced[:100] for row in rows if row.untraced)
    return [*lines, "", *(f"- {count} without a trace: {why}" for why, count in reasons.most_common()), ""]


def constants() -> list[str]:
    """Constants that the bench alone knows."""
    rows = [(f"`logits` `{kind}`, bytes a logit", *given) for kind, given in reading.LOGIT_BYTES.items()]
    rows += [(f"`{field}`, not said", *given) for field, given in reading.USUAL.items() if given[1]]
    return [
        "| what | value | from |",
        "| --- | --- | --- |",
        *(f"| {what} | {value:,} | {source} |" for what, value, source in rows),
        "",
    ]


def chosen(rows: Sequence[Row]) -> list[str]:
    """The planner's constants that no source gives, and what they rest on."""
    spread = scoring.spread(rows)
    found = [
        ("`ERROR`, standard deviation of the logarithm of predicted by measured", ERROR,
         f"these rows: {spread:.3f}, from the median of their errors, which outliers don't move; rounded up"),
        ("`TIGHT_FROM`, share of the memory", TIGHT_FROM, "the share at which `ERROR` leaves a chance of 85 %"),
        *((f"`STUCK`, share of the allocator's holes that it can't give back: {name}", share,
           "torch's allocator gives back what is free as a whole, and tries again; the shares were chosen while "
           "looking at the runs here that died, and no bench of their own has shown them")
          for name, share in STUCK.items()),
        ("reserved by allocated, examples of one length", FIXED_LENGTHS, "nvidia-smi beside torch's counters, here"),
        ("the same of padded batches", VARIABLE_LENGTHS, "the same"),
        *((f"`REUSED` by the step of what backward left: {name}", share, "the same") for name, share in REUSED.items()),
        ("activations left when backward ends", HELD_AT_END, "the first blocks' and the embedding's: about 3 of 32"),
    ]  # fmt: skip
    return [
        "| what | value | from |",
        "| --- | --- | --- |",
        *(f"| {what} | {value:g} | {source} |" for what, value, source in found),
        "",
    ]


def collected_later(rows: Sequence[Row]) -> list[str]:
    """Results for the cases that no constant was chosen with."""
    return [
        f"{len(rows)} cases of `bench/published/later.json`, written down before the planner was asked about any of "
        "them (`added` is the day). They count in no figure above, and no constant was chosen with them at hand.",
        "",
        *summary(rows),
        *classes(rows),
        *traced(rows),
        *fitting(rows),
        *others(rows),
        *measured(rows),
    ]


def page(rows: Sequence[Row], later: Sequence[Row]) -> str:
    """The page for docs/reference."""
    versions = ", ".join(f"{name} {number}" for name, number in installed().items())
    sources = sorted({re.split(r" \(|,|: ", str(row.case.get("source")))[0] for row in rows})
    return "\n".join(
        [
            "# The planner's memory, beside what was measured",
            "",
            f"Made by `python bench/planner.py --write` on {date.today()}: {versions}.",
            "",
            f"{len(rows)} published cases ([how they are read](../../bench/published/README.md)), from: "
            + "; ".join(sources)
            + ".",
            "",
            "- Read are torch's `max_memory_allocated` (`allocated`) or nvidia-smi (`smi`), and dsrun predicts the "
            "one that was read.",
            "- DeepSpeed: `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs`. They "
            "know weights, gradients and optimizer states, and no activations. A run on one process is taken for "
            "ZeRO-2 on one GPU, FSDP for ZeRO-3.",
            "- accelerate: `estimate_training_usage`, the largest of its columns for 16 bits (what "
            "`accelerate estimate-memory` shows as training with Adam), the step's for fp32. It knows the weights "
            "alone: no batch, no GPUs, no ZeRO.",
            "- Neither knows LoRA: they are not asked there.",
            "- fitcheck-llm knows one GPU, and there LoRA and QLoRA, too: its own function, with an A100's "
            "overhead.",
            "- The last column of the table below: the same figures if the rows of one source are left out, whichever "
            "makes them worst.",
            "- Errors are relative to what was measured. Doubtful measurements are shown and not scored.",
            "",
            "## In short",
            "",
            *summary(rows),
            "## By class",
            "",
            "What torch had allocated and what nvidia-smi showed, apart.",
            "",
            *classes(rows),
            "## By formula and by trace",
            "",
            "The formulas' constants were chosen with these rows at hand; the trace has none of its own.",
            "",
            *traced(rows),
            "## What fits",
            "",
            "A run fits where what is predicted is no more than the card has for torch; dsrun adds what the allocator "
            "can't give back, the CUDA context and NCCL, and says tight from a chance of 85 % down to 50 %: that "
            "counts as fits.",
            "",
            *fitting(rows),
            "## Seconds and main memory",
            "",
            *others(rows),
            "## Every measurement",
            "",
            *measured(rows),
            "## Cases that were collected later",
            "",
            *collected_later(later),
            "## What the bench assumes",
            "",
            "Bytes a logit in other projects' losses are the round middle of what published runs of the same code "
            "imply; dsrun itself knows `hf`, `hf-old` and `fused`.",
            "",
            *constants(),
            "## Constants without a source",
            "",
            "The planner's other constants come from the code that they describe. These were chosen with rows of this "
            "page at hand, none of them for a single row; the last column of the first table shows what they are worth "
            "where a source is left out.",
            "",
            *chosen(rows),
            "## Cases without a prediction",
            "",
            *unread([*rows, *later]),
            "",
        ]
    )


def installed() -> dict[str, str]:
    """The peers' versions."""
    found = {"Python": platform.python_version()}
    for name in ("deepspeed", "accelerate", "fitcheck-llm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def record(rows: Sequence[Row]) -> dict[str, Any]:
    """The results as data."""

    def numbers(found: Score) -> dict[str, Any]:
        return {"n": found.n, "median": rounded(found.median), "p90": rounded(found.p90)}

    return {
        "date": str(date.today()),
        "versions": installed(),
        "groups": {
            group: {
                tool: numbers(scoring.score([row for row in rows if belongs(row)], tool)) for tool in TOOLS
            }
            for group, belongs in GROUPS.items()
        },
        "fits": {
            tool: dict(zip(("right", "asked"), scoring.verdicts(rows, tool), strict=True)) for tool in TOOLS
        },
        "oom_recall": dict(zip(("found", "of"), scoring.verdicts(rows, "dsrun", fits=False), strict=True)),
        "ran_called_so": dict(zip(("found", "of"), scoring.verdicts(rows, "dsrun", fits=True), strict=True)),
        "tight": sum(scoring.word(row) == TIGHT for row in scoring.judged(rows)),
        "chances": [
            dict(zip(("from", "to", "runs", "ran"), one, strict=True)) for one in scoring.calibration(rows)
        ],
        "seconds": numbers(scoring.paces(rows)),
        "host": numbers(scoring.hosts(rows)),
        "classes": {
            name: {**numbers(found), "signed": rounded(signed)}
            for name, (found, signed) in scoring.by_class(rows).items()
        },
        "traced": {
            tool: {
                name: {**numbers(found), "signed": rounded(signed)}
                for name, (found, signed) in scoring.by_class(
                    [row for row in rows if TRACE in row.said], tool
                ).items()
            }
            for tool in ("dsrun", TRACE)
        },
        "brier": rounded(scoring.brier(rows)),
        "paces": {
            name: numbers(scoring.paces([row for row in rows if belongs(row)]))
            for name, belongs in scoring.PACED.items()
        },
        "refused": scoring.refused(rows),
        "rows": [
            {
                "id": row.case.get("id"),
                "scored": row.measured_gib is not None and not row.held and bool(row.said),
                "metric": row.case.get("metric"),
                "measured_gib": row.measured_gib,
                "said_gib": {tool: rounded(value) for tool, value in row.said.items()},
                "error": {tool: rounded(row.error(tool)) for tool in row.said},
                "smi_gib": row.smi_gib,
                "said_smi_gib": rounded(row.said_smi_gib.get("dsrun")),
                "smi_error": rounded(row.smi_error()),
                "smi_error_by_trace": rounded(row.smi_error(TRACE)),
                "added": row.case.get("added"),
                "moment": row.moment,
                "fits": row.case.get("fits"),
                "said_fits": dict(row.fits),
                "chance": None if row.used is None else rounded(chance(row.used)),
                "seconds_ratio": rounded(row.pace),
                "host_error": rounded(row.host),
                "notes": list(row.notes),
            }
            for row in rows
            if row.refused is None
        ],
    }


def accuracy_file(rows: Sequence[Row]) -> str:
    """The errors by class that `dsrun plan` names, as TOML."""
    lines = [
        "# Errors of the planner beside published runs, by class: made by `python bench/planner.py --write`.",
        "# memory: relative, whatever counter was read; seconds: a factor, up or down.",
    ]
    for part, classes in scoring.by_plans_class(rows).items():
        lines += ["", f"[{part}]"]
        lines += [
            f'"{name}" = {{ runs = {found.n}, median = {found.median:.3f}, p90 = {found.p90:.3f} }}'
            for name, found in classes.items()
        ]
    return "\n".join([*lines, ""])


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def compare(paths: Sequence[Path] = (reading.CASES,), *, trace: bool = False) -> list[Row]:
    """The rows of files of cases, a name once, with the peers' answers. trace: with dsrun's trace's, too."""
    both = peers.load()
    cases = {str(case.get("id")): case for path in paths for case in reading.load(path)}
    if trace:
        tracing.record_cases(list(cases.values()))
    return [scoring.predict(case, both, trace=trace) for case in cases.values()]


def main() -> None:
    """Compare, print, and write what is asked for. Exit code 1 where a row is refused; the others are scored."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=Path, action="append", metavar="FILE", help="repeatable")
    parser.add_argument("--traced", action="store_true", help="score dsrun's trace, too")
    parser.add_argument("--json", action="store_true", help="print data instead of a page")
    parser.add_argument("--write", action="store_true", help="write the page and the results")
    given = parser.parse_args()
    if given.write and given.cases:
        parser.error("--write is for the cases that are checked in")
    trace = given.traced or given.write
    rows = compare(given.cases or (reading.CASES,), trace=trace)
    later = [] if given.cases else compare((reading.LATER,), trace=trace)
    found = {**record(rows), "later": record(later)} if later else record(rows)
    data = json.dumps(found, ensure_ascii=False, indent=1)
    text = page(rows, later)
    print(data if given.json else text)
    if given.write:
        PAGE.write_text(text, encoding="utf-8")
        ACCURACY.write_text(accuracy_file([*rows, *later]), encoding="utf-8")
        (RESULTS / f"planner-{date.today()}.json").write_text(data + "\n", encoding="utf-8")
    if words := scoring.refused([*rows, *later]):
        for one in words:
            print(f"refused: {one['id']}: {one['reason']}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
