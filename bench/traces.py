"""The planner's traces beside its formulas.

    python bench/traces.py

Each network that ships, by both (bench/planner.py --traced has published runs). A recording takes a second or two of a
core, and is cached.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from published.tracing import record_all  # noqa: E402

from dsrun.jobs.assembly.planning.traced import Tracer  # noqa: E402
from dsrun.planner import lora, shapes  # noqa: E402
from dsrun.planner.gpu_memory import gpu_memory  # noqa: E402
from dsrun.planner.setup import Setup  # noqa: E402
from dsrun.planner.shape import from_config  # noqa: E402
from dsrun.planner.trace.replay import replay  # noqa: E402
from dsrun.planner.trace.request import UntraceableError  # noqa: E402
from dsrun.planner.trace.schedule import actions  # noqa: E402

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
            text = dict(
                config.get("text_config", config)
            )  # what stands beside it is no network of the planner's
            size = (named.parameters, name, text)
            found[text["model_type"]] = min(found.get(text["model_type"], size), size, key=lambda one: one[0])
    for name, fields in shapes.table().items():
        if "config" in fields:
            found.setdefault(fields["config"]["model_type"], (0, name, dict(fields["config"])))
    for _, name, config in found.values():
        yield name, config


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    began = time.monotonic()
    families()
    print(f"\n{time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
