"""Refusals of a release of DeepSpeed, beside dsrun's rules: `python -m tools.schemas.refusals [PACKAGE...]`.

Every `raise` and `assert` in the modules that read the config, and in those functions of the engine that check it, is
found in the source code (nothing of it is run). refusals.json says of each which rules name it, or why none has to.
What it lacks is printed, and what it has that the release hasn't: with a new DeepSpeed that is the list of what is not
yet a rule. Exits 1 if there is any. Without packages (deepspeed-*.tar.gz) the installed DeepSpeed is read.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.schemas.source import ReleaseSource

FILE = Path(__file__).with_name("refusals.json")
READERS = (
    "runtime/config.py",
    "runtime/config_utils.py",
    "runtime/precision_config.py",
    "runtime/zero/config.py",
    "runtime/zenflow/zenflow_config.py",
    "runtime/data_pipeline/config.py",
    "runtime/swap_tensor/aio_config.py",
    "module_inject/auto_ep_config.py",
)
"""Modules all of whose refusals are about the config."""

ENGINE = "runtime/engine.py"
CHECKS = (
    "_configure_tensor_parallel_states",
    "_assert_valid_mixed_precision_config",
    "_scheduler_from_config",
    "_do_sanity_check",
    "_validate_autoep_zero3_support",
    "_do_optimizer_sanity_check",
    "_configure_optimizer",
    "_configure_basic_optimizer",
    "_configure_zero_optimizer",
    "_configure_distributed_model",
    "random_ltd_initialize",
    "get_deepspeed_compile_backend",
    "compile",
)
"""Functions of the engine that look at the config; the others look at models, tensors and checkpoints."""


class Refusal(NamedTuple):
    """A place at which DeepSpeed stops."""

    file: str
    function: str
    text: str
    """Its message, with {} for what is put in; the condition where it has none."""


def refusals(source: ReleaseSource) -> list[Refusal]:
    """Refusals of a release, in the order of its code."""
    found = [each for file in READERS if file in source.files for each in _in(source, file)]
    found += [each for each in _in(source, ENGINE) if each.function in CHECKS]
    return list(dict.fromkeys(found))


def _in(source: ReleaseSource, file: str) -> Iterator[Refusal]:
    for function in ast.walk(source.tree(file)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    told = node.exc.args[0] if node.exc.args else node.exc.func
                    yield Refusal(file, function.name, _text(told))
                elif isinstance(node, ast.Assert):
                    bare = isinstance(node.test, ast.Constant)
                    yield Refusal(
                        file,
                        function.name,
                        _text(node.msg or node.test)
                        if node.msg or bare
                        else f"assert {ast.unparse(node.test)}",
                    )


def _text(node: ast.AST) -> str:
    """A message as far as the code says it."""
    if isinstance(node, ast.JoinedStr):
        return " ".join("".join(_part(part) for part in node.values).split())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return f"{_text(node.left)} {_text(node.right)}"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return _text(node.func.value)
    return " ".join(_part(node).split()) if isinstance(node, ast.Constant) else "{}"


def _part(node: ast.AST) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def known() -> dict[Refusal, list[str] | str]:
    """Refusal -> the rules that name it, or why none has to."""
    read = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        Refusal(file, function, text): answer
        for file, functions in read.items()
        for function, texts in functions.items()
        for text, answer in texts.items()
    }


def compared(source: ReleaseSource) -> tuple[list[Refusal], list[Refusal]]:
    """(those of a release that refusals.json lacks, those in it that the release hasn't)."""
    here, there = refusals(source), known()
    return [each for each in here if each not in there], [each for each in there if each not in here]


def main(arguments: list[str] | None = None) -> int:
    """Print what is not yet known of each release."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*", type=Path, metavar="PACKAGE")
    packages: Sequence[Path] = parser.parse_args(arguments).packages
    sources = [ReleaseSource.packed(path) for path in packages] or [ReleaseSource.installed()]
    lacking = 0
    for source in sources:
        new, gone = compared(source)
        lacking += len(new)
        print(
            f"DeepSpeed {source.release}: {len(refusals(source))} refusals, {len(new)} without a rule, {len(gone)} gone"
        )
        for sign, found in (("+", new), ("-", gone)):
            for each in found:
                print(f"{sign} {each.file}:{each.function}: {each.text}")
    return int(lacking > 0)


if __name__ == "__main__":
    sys.exit(main())
