"""The planner's traces beside its formulas, and beside what was measured and published.

    python bench/traces.py published [--cases FILE]... [--json FILE]
    python bench/traces.py families
    python bench/traces.py others

published: every case of bench/published that can be traced, by formula and by trace, scored by class and by what was
read. families: each network that ships, by both. others: networks that dsrun has no formulas for, from their published
configs, beside a second way to count. Each recording takes a second or two of a core, and is cached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from published import reading  # noqa: E402

from dsrun.jobs.assembly.planning import recordings  # noqa: E402
from dsrun.jobs.assembly.planning.traced import Tracer  # noqa: E402
from dsrun.planner import lora, shapes  # noqa: E402
from dsrun.planner.gpu_memory import gpu_memory, untracked_gib  # noqa: E402
from dsrun.planner.setup import Setup  # noqa: E402
from dsrun.planner.shape import config_of, from_config  # noqa: E402
from dsrun.planner.trace.replay import replay  # noqa: E402
from dsrun.planner.trace.request import UntraceableError, request_of  # noqa: E402
from dsrun.planner.trace.schedule import actions  # noqa: E402
from dsrun.words import GIB  # noqa: E402


def tracer_of(case: Mapping[str, Any], setup: Setup) -> Tracer:
    """The tracer of a case's network. Raises UntraceableError for one that transformers doesn't have."""
    fields = shapes.find(str(case.get("model"))) or {}
    config = fields.get("config") or config_of(setup.shape, fields.get("like", "llama"))
    if config is None:
        raise UntraceableError("its blocks are no network's of transformers")
    roles = [part for role in setup.targets or () for part in role.split("+")]
    names = "all" if setup.targets is None else ",".join(f"{role}_proj" for role in roles)
    rank = setup.adapters // max(1, lora.lora_weights(setup.shape, 1, setup.targets)) or 8
    adapter = {"rank": rank, "target": names, "dropout": setup.lora_dropout}
    return Tracer(config, adapter)


def record_all(setups: Iterator[tuple[Tracer, Setup]]) -> None:
    """Make the recordings that are not in the cache, all in one process."""
    requests = {}
    for tracer, setup in setups:
        with suppress(UntraceableError):
            request = request_of(setup, tracer.architecture, tracer.lora)
            requests[recordings.key_of(request)] = request
    missing = {key: request for key, request in requests.items() if not recordings.cached(key)}
    if missing and (why := recordings.record(missing, 3600)):
        print(why, file=sys.stderr)


def traced_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """A case's figures, in GiB: measured, by formula and by trace. Raises UntraceableError and UnreadableError."""
    setup = reading.read(case).setup
    tracer = tracer_of(case, setup)
    model = tracer.model(setup)
    if model is None:
        raise UntraceableError(tracer.reasons[-1])
    metric = case.get("metric") if case.get("metric") in ("allocated", "reserved", "smi") else "allocated"
    before = bool(case.get("opt_before_states"))
    steps = list(actions(setup, model.recording, model.events))
    if before:
        steps = steps[: next(number for number, action in enumerate(steps) if action.key == "step")]
    found = replay(steps)
    outside = untracked_gib(setup.gpus)
    by_trace = {"allocated": found.allocated / GIB, "reserved": found.reserved / GIB}
    by_trace["smi"] = by_trace["reserved"] + outside
    formula = gpu_memory(setup, optimizer_states=not before)
    return {
        "id": case["id"], "metric": metric, "class": class_of(case), "measured": case.get("measured_gpu_gib"),
        "formula": getattr(formula, str(metric)) / GIB, "trace": by_trace[str(metric)],
        "allocated": [formula.allocated / GIB, by_trace["allocated"]], "moment": formula.moment,
    }  # fmt: skip


def readable(cases: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Tracer, Setup]]:
    """The tracers and setups of the cases that have them."""
    for case in cases:
        with suppress(UntraceableError, reading.UnreadableError):
            setup = reading.read(case).setup
            yield tracer_of(case, setup), setup


def class_of(case: Mapping[str, Any]) -> str:
    """full, LoRA or QLoRA, on one GPU or on several."""
    method = "QLoRA" if case.get("quant") else "LoRA" if case.get("lora") else "full"
    return f"{method}, {'one GPU' if int(case.get('gpus') or 1) == 1 else 'several'}"


def published(paths: Sequence[Path], target: Path | None) -> None:
    """The table of classes, and the reasons of what can't be traced."""
    rows: list[dict[str, Any]] = []
    reasons: dict[str, int] = defaultdict(int)
    cases = [
        case
        for path in paths
        for case in reading.load(path)
        if case.get("measured_gpu_gib") and not (case.get("hold") or case.get("host_only"))
    ]
    record_all(readable(cases))
    for case in cases:
        try:
            rows.append(traced_case(case))
        except (UntraceableError, reading.UnreadableError) as reason:
            reasons[str(reason)[:100]] += 1
    if target:
        target.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[str(row["class"]), str(row["metric"])].append(row)
    print(
        "| class | read | n | formula: median, 90th, bias | trace: median, 90th, bias |\n"
        + "| --- " * 5
        + "|"
    )
    for (name, metric), group in sorted(groups.items()):
        cells = [summary([row[tool] / row["measured"] - 1 for row in group]) for tool in ("formula", "trace")]
        print(f"| {name} | {metric} | {len(group)} | {' | '.join(cells)} |")
    for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1]):
        print(f"- {count} not traced: {reason}")


def summary(errors: Sequence[float]) -> str:
    """Median and 90th percentile of the errors' sizes, and the median with its sign."""
    sizes = sorted(map(abs, errors))
    p90 = statistics.quantiles(sizes, n=10, method="inclusive")[8] if len(sizes) > 1 else sizes[0]
    return f"{statistics.median(sizes):.1%}, {p90:.1%}, {statistics.median(errors):+.1%}".replace("%", " %")


WAYS: dict[str, dict[str, Any]] = {
    "full": {"engine": "torch", "precision": "pure"},
    "full, recomputed": {"engine": "torch", "precision": "pure", "checkpointing": 1},
    "LoRA, recomputed": {"engine": "torch", "precision": "pure", "checkpointing": 1, "method": "lora"},
    "ZeRO-2, recomputed": {"stage": 2, "gpus": 8, "checkpointing": 1},
    "ZeRO-3": {"stage": 3, "gpus": 8},
}
"""Trainings that formula and trace are compared for, 4 x 2,048 tokens each."""


def families() -> None:
    """A line for each network with formulas: the trace's peak less the formula's, for each of WAYS."""
    print("| network | model | " + " | ".join(WAYS) + " |\n" + "| --- " * (len(WAYS) + 2) + "|")
    networks = list(released())
    record_all((tracer_for(config), setup_of(config, way)) for _, config in networks for way in WAYS.values())
    for name, config in networks:
        cells = []
        for way in WAYS.values():
            setup = setup_of(config, way)
            try:
                cells.append(f"{traced_bytes(setup, config) / gpu_memory(setup).allocated - 1:+.1%}")
            except UntraceableError as reason:
                cells.append(str(reason)[:60])
        print(f"| {config['model_type']} | {name} | {' | '.join(cells)} |".replace("%", " %"), flush=True)


def setup_of(config: Mapping[str, Any], way: Mapping[str, Any]) -> Setup:
    """A setup of WAYS for a network."""
    shape = from_config(config, str(config["model_type"]))
    length = min(2048, shape.positions or 2048)
    eager = config["model_type"] in (
        "gemma2",
        "gpt_oss",
    )  # transformers has no other attention for them on a CPU
    setup = Setup(shape=shape, micro_batch=4, seq_len=length, flash=not eager, fused_adam=False)
    setup = setup.changed(**way)
    return setup.changed(adapters=lora.lora_weights(shape, 8)) if setup.method == "lora" else setup


def tracer_for(config: Mapping[str, Any]) -> Tracer:
    """A network's tracer, with LoRA on all matrices."""
    return Tracer(config, {"rank": 8, "target": "all", "dropout": 0.0})


def traced_bytes(setup: Setup, config: Mapping[str, Any]) -> float:
    """torch's peak by trace. Raises UntraceableError."""
    tracer = tracer_for(config)
    model = tracer.model(setup)
    if model is None:
        raise UntraceableError(tracer.reasons[-1])
    return replay(actions(setup, model.recording, model.events)).allocated


def released() -> Iterator[tuple[str, dict[str, Any]]]:
    """A model of each network that ships: the smallest with a config."""
    from dsrun.models import model_files, resolve

    found: dict[str, tuple[int, str, dict[str, Any]]] = {}
    for name in model_files.names():
        config, _, named = resolve.config_of(name)
        if named and named.parameters > 4e8:  # cuBLAS's 8 MiB are no share of it
            size = (named.parameters, name, dict(config))
            found[config["model_type"]] = min(
                found.get(config["model_type"], size), size, key=lambda one: one[0]
            )
    for name, fields in shapes.table().items():
        if "config" in fields:
            found.setdefault(fields["config"]["model_type"], (0, name, dict(fields["config"])))
    for _, name, config in found.values():
        yield name, config


def main() -> None:
    """Do what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("published", "families"))
    parser.add_argument("--cases", type=Path, action="append", metavar="FILE", help="repeatable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row")
    arguments = parser.parse_args()
    began = time.monotonic()
    if arguments.what == "published":
        published(arguments.cases or [reading.CASES, reading.LATER], arguments.json)
    else:
        families()
    print(f"\n{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
