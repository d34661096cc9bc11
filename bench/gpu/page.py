"""docs/reference/gpu.md from the results that are kept: what has run on which card and when, or not yet. Beside it a
verification card of each model, preset and card: docs/reference/cards/MODEL-PRESET-CARD.md; and what decides a default:
presets/measured.

    python bench/gpu/page.py [--write]

Only what ran on a GPU counts; of a case that ran several times, the last one.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from common import CHECKOUT, GIB, stored

from dsrun.catalog import read_toml
from dsrun.planner import gpus as kinds

CARDS = CHECKOUT / "docs/reference/cards"
DECIDES = CHECKOUT / "presets/measured"
PAGE, EXPORTING = CHECKOUT / "docs/reference/gpu.md", CHECKOUT / "bench/results/exporting.json"
MB = 10**6
NOT_YET = "not yet"
EXPORTED = (
    "at most {over:.0f} MB above the start while a model of {size:.0f} MB is written in files of {file:.0f} MB, "
    "on two CPU ranks: {cases}"
)
"""File of bench/exporting.py's result."""
OFF = 0.08
"""Largest distance of the plan from a measurement."""


class Item(NamedTuple):
    """A row of the page."""

    what: str
    cases: tuple[str, ...]
    """Cases of the bench: PART/NAME, or how several names begin. None: one GPU can't show it."""
    without: str
    """What shows it without a card."""


ITEMS = (
    Item("every preset trains, with the CPU's losses",
         ("works/ddp", "works/zero1", "works/zero2", "works/zero3", "works/fsdp"),
         "[each preset on CPU ranks](presets-measured.md)"),
    Item("NCCL between ranks; `overlap_comm` at ZeRO-1 and 2 (on from deepspeed 0.19.8)", ("many/",),
         "where it is switched on, by tests; that it is right, by DeepSpeed's code alone"),
    Item("attention: torch's SDPA, its varlen kernel, flash-attn 2, 3 and 4", ("works/attention-", "speed/attention-"),
         "the same losses to 1e-5 with stand-ins for the kernels"),
    Item("flex_attention", ("speed/attention-flex",), "no kind of attention of dsrun's: see below"),
    Item("liger-kernel's fused loss", ("works/zero3-no-liger", "speed/8b-widths-4k-no-liger"),
         "loss and gradients with a stand-in that works as it does; its own kernels in Triton's interpreter, to 1e-5"),
    Item("liger-kernel's RMSNorm, rotary positions and gated layers",
         ("works/zero3-no-liger", "speed/8b-widths-4k-no-liger"),
         "its kernels (0.8.5) in Triton's interpreter on tiny models, fp32: logits within 3e-6 of transformers' for "
         "all 23 kinds; four lines of the kernels that the interpreter can't run were written otherwise for that"),
    Item("`--compile`",
         ("works/zero2-compile", "works/fsdp-compile", "speed/8b-widths-4k-compile", "speed/8b-widths-4k-fsdp-compile"),
         "losses, names and numbers of graphs in one process, FSDP's among them; several ranks: full lane"),
    Item("products in fp8 under FSDP (`--fp8`)",
         ("works/fsdp-fp8-", "speed/8b-widths-4k-fsdp-rowwise", "speed/8b-widths-4k-fsdp-tensorwise"),
         "losses near bf16's by torchao's emulation, checkpoints and exports as without, sizes that the units take"),
    Item("torch's fused AdamW in the place of DeepSpeed's", ("works/zero2-fused-torch-adam", "speed/adam-"),
         "which one a job takes"),
    Item("DeepSpeed's operators compiled here; a job without nvcc",
         ("works/compiles-", "works/zero2-no-nvcc"), "what is asked for before the start, with faked facts"),
    Item("fp16", ("works/fp16",), "loss scaling on processors that have fp16"),
    Item("batches made ahead, pinned, copied without a wait", ("works/zero2",),
         "order, errors and one read of the device a step, by tests"),
    Item("a budget of tokens (`--tokens-per-batch`)", ("works/tokens-per-batch",),
         "plain torch's losses to 1e-5 on two CPU ranks, stages 0 to 3 and FSDP"),
    Item("kill -9 and resume", ("works/killed-and-resumed-",), "the losses of an undisturbed run, on CPU ranks"),
    Item("checkpoints written beside the training (`--async-save`)",
         ("works/zero2-async-save", "works/fsdp-async-save", "works/killed-and-resumed-async-save"),
         "the bytes and losses of checkpoints that are waited for, on two CPU ranks; kill -9 and a full disk in the "
         "middle of one: full lane"),
    Item("the export, file by file, read by transformers", ("works/export-loads-",), EXPORTED),
    Item("FSDP's copies across hosts", (), "losses and weights, on four CPU ranks"),
    Item("preset `zero3-hpz`", (),
         "zero3's losses and weights on four CPU ranks, with backward's gathers within a host: full lane"),
    Item("preset `zero3-qwz` (8-bit weights between hosts)", ("many/many-zero3-qwz",),
         "DeepSpeed reads its config, and what can't be right is refused; the kernel runs on CUDA alone"),
    Item("preset `zero3-zeropp` (4-bit gradients, too)", (), "the same; it needs two hosts with GPUs"),
    Item("SuperOffload", (), "nothing: it runs on CUDA alone, and no preset has it"),
    Item("memory and seconds beside the plan", ("planned/",),
         "[published runs](planner-accuracy.md), [CPU ranks](planner-measured.md)"),
    Item("model FLOPs utilisation, beside a plain Trainer", ("speed/8b-",), "nothing"),
)  # fmt: skip
HEAD = """# What has run on GPUs

Made by `python bench/gpu/page.py --write` from the results in bench/results/gpu. {lead}
What a CPU can show is tested there, with real launchers and faked facts of GPUs at the edge; the last column says what
stands in for a card. Whoever has one: `bench/gpu/run.sh works`, `speed` and `planned` take under nine minutes each, on
one GPU of 80 GB and without a network (`bench/gpu/make_wheels.sh` makes the wheels); `bench/gpu/run.sh many` is for 2
to 8 GPUs in a host. What `--compile` did on a card becomes a file of presets/measured, by which `dsrun finetune`
decides whether layers are compiled there: no measurement, no default. A model, a preset and a card that ran together
get a verification card: loss against the CPU's,
memory and seconds against the plan, MFU, kill -9 and resume, the export read back.

| item | on a card | what shows it without one |
| --- | --- | --- |
"""
FLEX = """
flex_attention is measured by the bench, and no `--attention` of dsrun's: it makes a mask of blocks for each packed
sequence and compiles a kernel, where torch's varlen kernel takes the examples' borders as they are. What varlen doesn't
compute (GPUs before Ampere, fp32, soft caps and sinks) goes through torch's SDPA under a mask, or eagerly.
"""


PLACES = """
## What a GPU alone takes

Each function of dsrun's training that asks for a GPU (a test compares the list with the code), and the tests that run
it without one. `tests/stand_in_cuda` puts a runtime that computes nothing under a CUDA build of torch, whose tensors
have no content: its own checks, shapes, devices, memory and backward passes are torch's.

| place | what exercises it without a card |
| --- | --- |
"""


def places() -> Iterator[str]:
    """Rows of the functions that ask for a GPU."""
    for module, functions in read_toml(Path(__file__).with_name("branches.toml")).items():
        for function, tests in functions.items():
            shown = ", ".join(f"`{test}`" for test in tests) or "nothing"
            yield f"| `{module.removesuffix('.py')}: {function}` | {shown} |"


def without(item: Item) -> str:
    """What shows it without a card."""
    if item.without != EXPORTED:
        return item.without
    found = json.loads(EXPORTING.read_text(encoding="utf-8"))
    rows = found["rows"]
    return EXPORTED.format(
        over=max(row["over"] for row in rows) / MB, size=found["weights"] / MB, file=found["file"] / MB,
        cases=", ".join(row["case"] for row in rows),
    )  # fmt: skip


def newest(lines: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Part/case -> its last result on a GPU."""
    found = {}
    for line in lines:
        if not line["tiny"] and "skipped" not in line:
            found[f"{line['part']}/{line['case']}"] = line
    return found


def cell(item: Item, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Card, date and outcome."""
    if not item.cases:
        return NOT_YET
    own = {name: line for name, line in found.items() if _belongs(name, item.cases)}
    if not own:
        return NOT_YET
    last = max(own.values(), key=lambda line: str(line["day"]))
    failed = [name.partition("/")[2] for name, line in own.items() if line["failed"]]
    ended = f"; failed: {', '.join(failed)}" if failed else ""
    return f"{str(last['where']).partition(',')[0]}, {last['day']}: {len(own) - len(failed)} of {len(own)} cases{ended}"


def _belongs(name: str, cases: Iterable[str]) -> bool:
    """Whether a result is one of these; a case that ends with a dash or a slash stands for all that begin so."""
    return any(name.startswith(case) if case.endswith(("-", "/")) else name == case for case in cases)


def figures(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Measurements, in tables. Nothing where there are none."""
    runs = [
        (name, line) for name, line in found.items() if name.startswith("speed/8b-") and not line["failed"]
    ]
    if runs:
        yield "\n## Llama-3-8B's widths, and LoRA on all of it, on one card\n"
        yield "| run | tokens/s | MFU | allocated GiB |\n| --- | ---: | ---: | ---: |"
        for name, line in runs:
            share = f"{line['mfu']:.1%}" if line["mfu"] else ""
            held = line["gpu_allocated_bytes"]
            yield f"| {name[6:]} | {line['tokens_per_second']:,.0f} | {share} | {_gib(held)} |"
    plans = [(name, line) for name, line in found.items() if name.startswith("planned/")]
    if plans:
        yield "\n## The plan\n\n| run | planned GiB | allocated GiB | off | planned s/step | s/step |"
        yield "| --- | ---: | ---: | ---: | ---: | ---: |"
        for name, line in plans:
            off = line.get("off")
            said = line["failed"] or (
                "" if off is None else f"{off:+.1%}" if abs(off) <= OFF else f"**{off:+.1%}**"
            )
            cells = (_gib(line.get("planned_allocated_bytes")), _gib(line.get("gpu_allocated_bytes")), said,
                     _seconds(line.get("planned_step_seconds")), _seconds(line.get("step_seconds")))  # fmt: skip
            yield f"| {name[8:]} | {' | '.join(cells)} |"
    kernels = [
        (name, line)
        for name, line in found.items()
        if name.startswith(("speed/attention-", "speed/adam-")) and not line["failed"]
    ]
    if kernels:
        yield "\n## Kernels\n\n| kernel | ms |\n| --- | ---: |"
        yield from (f"| {name[6:]} | {1e3 * line['seconds']:.2f} |" for name, line in kernels)

    collectives = [
        (name, line)
        for name, line in found.items()
        if line.get("bus_bytes_per_second") and not line["failed"]
    ]
    if collectives:
        yield "\n## NCCL\n\n| collective | GPUs | GB/s (bus) |\n| --- | ---: | ---: |"
        for name, line in collectives:
            rate = line["bus_bytes_per_second"] / 1e9
            yield f"| {name[5:]} | {line['ranks']} | {rate:.1f} |"
    several = [
        (name, line) for name, line in found.items() if name.startswith("many/many-") and not line["failed"]
    ]
    if several:
        yield "\n## Several GPUs\n"
        yield "| run | GPUs | tokens/s | MFU | allocated GiB |\n| --- | ---: | ---: | ---: | ---: |"
        for name, line in several:
            share = f"{line['mfu']:.1%}" if line["mfu"] else ""
            held = _gib(line["gpu_allocated_bytes"])
            yield f"| {name[10:]} | {line['gpus']} | {line['tokens_per_second']:,.0f} | {share} | {held} |"
    if cards := cards_of(found.values()):
        yield "\n## Verification cards\n"
        yield from (f"- [{title}](cards/{name})" for name, (title, _) in sorted(cards.items()))


CARD = """# {title}

Made by `python bench/gpu/page.py --write` from the results in bench/results/gpu; {day}, {where}.

| what | set-up | result |
| --- | --- | --- |
"""


def cards_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """File name -> title and text of the card of each model, preset and GPU. lines: the last result of each case."""
    together: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        if "model" in line and "preset" in line:
            key = (line["model"], line["preset"], line["where"].split(",")[0])
            together.setdefault(key, []).append(line)
    made = {}
    for key, results in together.items():
        title = f"{key[0]}, {key[1]}, {key[2]}"
        name = re.sub(r"[^a-z0-9.]+", "-", "-".join(key).lower()).strip("-") + ".md"
        newest_line = max(results, key=lambda line: line["day"])
        head = CARD.format(title=title, day=newest_line["day"], where=newest_line["where"])
        made[name] = (title, head + "\n".join(_card_rows(results)) + "\n")
    return made


COMPILED = {
    "zero": ("8b-widths-4k", "8b-widths-4k-compile"),
    "fsdp": ("8b-widths-4k-fsdp", "8b-widths-4k-fsdp-compile"),
}
"""Engine (dsrun.planner.analysis.measured) -> the cases of speed.py without and with --compile."""
MEASURED = """# --compile on this GPU, made by `python bench/gpu/page.py --write` from the results in bench/results/gpu.
# `dsrun finetune` reads it: where a step is so much faster that it pays, layers are compiled unless somebody says no.
seconds_without = {without:.6g}
seconds_with = {compiled:.6g}
start_seconds = {start:.4g}
day = "{day}"
with_what = "{with_what}"
"""


def measured_files(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """File name -> text of each measurement that decides a default. lines: all results."""
    by_card: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_card.setdefault(line["where"].split(",")[0], []).append(line)
    made = {}
    for card, results in by_card.items():
        kind, last = kinds.recognise(card), newest(results)
        for engine, cases in COMPILED.items():
            pair = [last[f"speed/{case}"] for case in cases if f"speed/{case}" in last]
            whole = [line for line in pair if not line["failed"] and line.get("step_seconds")]
            if kind is None or len(whole) < len(cases):
                continue
            plain, compiled = pair
            starts = [line.get("first_step_seconds") or line["step_seconds"] for line in pair]
            made[f"compile-{kind.name}-{engine}.toml"] = MEASURED.format(
                without=plain["step_seconds"], compiled=compiled["step_seconds"], start=max(0.0, starts[1] - starts[0]),
                day=compiled["day"], with_what=f"{compiled['model']}; {compiled['where'].partition('; ')[2]}",
            )  # fmt: skip
    return made


def write_only(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into a folder, and remove all others like them."""
    ends = {Path(name).suffix for name in files} or {".md", ".toml"}
    for old in folder.glob("*") if folder.is_dir() else ():
        if old.suffix in ends and old.name not in files:
            old.unlink()
    for name, text_of in files.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text_of, encoding="utf-8")


def _card_rows(results: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Rows of a card: each thing to verify, for each set-up that shows it, or "not yet"."""
    for what, key, said in VERIFIED:
        shown = [line for line in results if line.get(key) is not None]
        if not shown:
            yield f"| {what} | | {NOT_YET} |"
        for line in shown:
            failed = f"**{line['failed']}**" if line["failed"] else ""
            # A run with other losses has figures all the same; one that died has none.
            yield f"| {what} | {line.get('set_up', line['case'])} | {failed or said(line)} |"


def _beside_plan(line: Mapping[str, Any], measured: str, planned: str, scale: float, unit: str) -> str:
    """A measurement, and how far the plan is from it."""
    value, plan = line[measured], line.get(planned)
    text = f"{value / scale:.3g} {unit}"
    return text if plan is None else f"{text}, plan {plan / scale:.3g} ({plan / value - 1:+.1%})"


VERIFIED: tuple[tuple[str, str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("losses against a CPU's in fp32", "difference",
     lambda line: f"{line['difference']:.1e} apart at most ({line['tolerance']:.0e} allowed)"),
    ("peak against the plan", "gpu_allocated_bytes",
     lambda line: _beside_plan(line, "gpu_allocated_bytes", "planned_allocated_bytes", GIB, "GiB")),
    ("seconds a step against the plan", "step_seconds",
     lambda line: _beside_plan(line, "step_seconds", "planned_step_seconds", 1, "s")),
    ("model FLOPs utilisation", "mfu", lambda line: f"{line['mfu']:.1%}"),
    ("kill -9 and resume", "resumed", lambda _: "goes on with the losses of an undisturbed run"),
    ("export read back", "exported", lambda _: "transformers loads it; its numbers are finite"),
)  # fmt: skip
"""Rows of a card: the name, the field of a result that shows it, and what is said of one that didn't fail."""


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def text(lines: Iterable[Mapping[str, Any]]) -> str:
    """The page."""
    found = newest(lines)
    lead = "No GPU has run dsrun yet." if not found else "Each figure names its card."
    rows = [f"| {item.what} | {cell(item, found)} | {without(item)} |" for item in ITEMS]
    return (
        HEAD.format(lead=lead)
        + "\n".join([*rows, FLEX.rstrip("\n"), *figures(found), PLACES.rstrip("\n"), *places()])
        + "\n"
    )


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(CHECKOUT)}")
    made = text(stored())
    if parser.parse_args().write:
        Path(PAGE).write_text(made, encoding="utf-8")
        cards = cards_of(newest(stored()).values())
        write_only(CARDS, {name: card for name, (_, card) in cards.items()})
        write_only(DECIDES, measured_files(stored()))
    else:
        print(made, end="")


if __name__ == "__main__":
    main()
