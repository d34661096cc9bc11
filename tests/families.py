"""Families of models beside what can be done with them, each tried on a tiny checkpoint; a table of it.

    python tests/families.py [FAMILY ...]       writes docs/reference/families.md

Two ranks train each family's text part, under ZeRO-3 and, with LoRA, under ZeRO-2
(tests/training/models/text_parts.py); the losses and the whole export are compared with a plain loop of the family's
own class. What is refused is asked of the functions that refuse it before a job starts.
tests/training/models/test_text_parts_for_real.py compares more in the full lane, and three families in the default one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/training/models"), str(ROOT / "tests/training")]

import torch
from plain_text_loop import FAMILIES, check_whole, on_two_ranks, plain_loop
from tiny_checkpoints import write_checkpoint

import dsrun
from dsrun.errors import DsrunError
from dsrun.jobs.assembly.checks import parallelism
from dsrun.models import model_files, multimodal, resolve, transformers_code
from dsrun.options.table import ParallelismOptions
from dsrun.training.data.packing import keeps_states
from dsrun.training.loop import SEES_OTHERS
from dsrun.training.models.text_part import towers

PAGE = ROOT / "docs" / "reference" / "families.md"
MEASURED = ROOT / "bench" / "results" / "parallelism.json"
KINDS = ("tp", "sp", "pp", "ep")
COLUMNS = ("plan", "train", "LoRA", "pack", *(f"--{kind}" for kind in KINDS), "export whole")
STATES = "layers with a state mix what one sequence holds, without kernels that take borders"
STAGES = {"packing": False, "attention": parallelism.SDPA}
"""Defaults that give way to a pipeline."""
CASES, EXPERTS = ("zero3:full", "zero2:lora"), "zero2:ep"
CLOSE = 1e-5
"""Largest distance of a loss from the plain loop's."""
HYBRIDS = ("qwen3_next", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "olmo_hybrid")
"""Families of text with layers that keep a state."""
HEAD = """# Families of models

<!-- Written by tests/families.py. -->

Each family that `dsrun models` has a name of, that has more than text in its checkpoints, that keeps states or whose
experts can be divided, on a tiny random checkpoint of its own architecture. *exact*: the losses of ten AdamW steps on
two ranks in fp32 (ZeRO-3; LoRA and `--ep`: ZeRO-2) are within {close:g} of a plain loop of the family's own class; a
plan counts the weights of the text part to the last; packed examples stay apart; a whole export has its towers bit by
bit and the trained model's logits; for `--tp`, `--sp` and `--pp` what was [measured](parallelism.md) of the network.
*loaded* says what becomes of what is no text: frozen, or not loaded at all.
{where}

"""


def planned(folder: Path, model: Any) -> str:
    """Whether a plan counts the weights that are trained, all of them."""
    place: dict[str, Any] = {"gpu": "a100-80g", "gpus": 2}
    try:
        try:
            shape = dsrun.plan(str(folder), trace=False, **place)["model"]
        except DsrunError:  # there are no formulas
            shape = dsrun.plan(str(folder), **place)["model"]
    except DsrunError as error:
        return refused(error)
    text = sum(weight.numel() for weight in model.parameters()) - sum(map(_elements, towers(model).values()))
    counted = shape["parameters"] - shape["frozen"]
    return "exact" if counted == text else f"off: {counted:,} of {text:,}"


def named() -> list[str]:
    """The families of the page, in its order."""
    models = (model.architecture.get("model_type") for model in model_files.list_models())
    text = {str(kind) for kind in models} | {*parallelism.EXPERT_NETWORKS} | {*HYBRIDS}
    return [*FAMILIES, *sorted(kind for kind in text - {*FAMILIES} if _makes(kind))]


def _makes(kind: str) -> bool:
    """Whether the installed transformers has a causal model of that type."""
    return transformers_code.causal_class(kind) is not None


def divided(kind: str, folder: Path) -> str:
    """What is said of a division among two ranks; empty where nothing is said against it."""
    setup = parallelism.ParallelSetup(
        parallel=ParallelismOptions(**{kind: 2}), devices=(2,), stage=1, **(STAGES if kind == "pp" else {}),
        **parallelism.network_fields(resolve.config_of(str(folder))[0]),
    )  # fmt: skip
    problems = parallelism.refusals(setup)
    return f"refused: {problems[0].what}" if problems else ""


def measured(kind: str, network: str) -> str:
    """What was measured of a network divided among two ranks; glm is ChatGLM's."""
    models = {"glm": ("chatglm2-tiny",), "mistral": ("mistral-tiny", "mistral-long-tiny")}
    lines = json.loads(MEASURED.read_text(encoding="utf-8"))
    mine = [
        one for one in lines
        if one["model"] in models.get(network, (f"{network}-tiny",))
        and (one["layout"], one["method"]) == (f"{kind}2", "full")
    ]  # fmt: skip
    losses = [one["losses"] for one in mine if one["kind"] == "sgd" and not one["refused"]]
    if not losses:
        return "taken: not measured"
    return "exact" if max(losses) <= CLOSE else f"wrong: off by {max(losses):.1g}"


def refused(error: DsrunError) -> str:
    return f"refused: {error.problems[0].what.partition(', only for')[0]}"


def tried(check: Callable[[], Any]) -> str:
    """exact, or what an assertion said."""
    try:
        check()
    except AssertionError as error:
        return f"wrong: {str(error).splitlines()[0] if str(error) else 'not equal'}"
    return "exact"


def row(family: str, folder: Path, model: Any, lines: dict[str, dict[str, Any]]) -> dict[str, str]:
    """A family's cells. lines: what two ranks came to in each of its cases, by the case."""
    full, lora = (lines[f"{family}:{case}"] for case in CASES)
    assert "error" not in full, full
    losses, trained = plain_loop(folder, "full")
    with_lora, _ = plain_loop(folder, "lora")

    def near(line: dict[str, Any], wanted: list[float]) -> Callable[[], None]:
        def check() -> None:
            assert "error" not in line, line["error"]
            furthest = max(abs(one - other) for one, other in zip(line["losses"], wanted, strict=True))
            assert furthest <= CLOSE, f"off by {furthest:.1g}"

        return check

    ranks = {kind: divided(kind, folder) for kind in KINDS}
    if not ranks["ep"]:
        ranks["ep"] = tried(near(lines[f"{family}:{EXPERTS}"], losses))
    return {
        "loaded": str(multimodal.way(resolve.config_of(str(folder))[0]) or "all"),
        "plan": planned(folder, model),
        "train": tried(near(full, losses)),
        "LoRA": tried(near(lora, with_lora)),
        "pack": "exact" if full["packs"] else f"refused: {STATES if keeps_states(model) else SEES_OTHERS}",
        **{f"--{kind}": said or measured(kind, family) for kind, said in ranks.items()},
        "export whole": tried(lambda: check_whole(full, folder, trained)),
    }


def _elements(weight: Any) -> int:
    return int(weight.numel())


def table(rows: dict[str, dict[str, str]]) -> str:
    """The page's table; reasons stand below it, by number."""
    reasons: dict[str, int] = {}
    lines = [f"| family | loaded | {' | '.join(COLUMNS)} |", f"|{' --- |' * (len(COLUMNS) + 2)}"]
    for family, cells in rows.items():
        short = []
        for column in COLUMNS:
            cell = cells[column]
            word, _, reason = cell.partition(": ")
            if reason:
                # Reasons that differ by the family's name alone are one.
                number = reasons.setdefault(reason.replace(f"{family} ", "it "), len(reasons) + 1)
                word = f"{word} ({number})"
            short.append(word)
        lines.append(f"| `{family}` | {cells['loaded']} | {' | '.join(short)} |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items())]) + "\n"


def main() -> None:
    """Write the page; families that are named are shown instead."""
    torch.set_num_threads(1)
    families = sys.argv[1:] or named()
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    rows = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        models = {family: write_checkpoint(folder / family, family) for family in families}
        cases = [f"{family}:{case}" for family in families for case in CASES]
        cases += [f"{family}:{EXPERTS}" for family in families if not divided("ep", folder / family)]
        lines = on_two_ranks(cases, folder, environ)
        for family in families:
            rows[family] = row(family, folder / family, models[family], lines)
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "deepspeed", "torch", "peft"))
    where = f"Measured {date.today().isoformat()} on CPU ranks with {versions}."
    text = HEAD.format(close=CLOSE, where=where) + table(rows)
    if sys.argv[1:]:
        sys.stdout.write(text)
    else:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
