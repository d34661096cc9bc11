"""Share of small changes to the rules that tests notice: mutation testing with cosmic-ray, and a page for docs/.

    pip install cosmic-ray
    python bench/mutation.py [--sample 500] [--seed 1] [--module zero] [--output docs/reference/mutation.md]
    python bench/mutation.py --again bench/results/mutation-2026-11-23.json --output docs/reference/mutation.md

(cosmic-ray is needed here alone, so it isn't among what the tests install.) The project is copied to a temporary
folder, and its modules of rules are changed there, one place at a time; the same share of each module's mutants is
drawn. A mutant is killed where bench/mutant.py fails, the functions of test_expected.py, test_rules.py and
test_known.py, or where one of these takes over 20 s. One that isn't meets the other tests of the rules in pytest
before it counts as a survivor. With --output the page and bench/results/mutation-<date>.json are written. --again
takes the mutants from such a file, and tests those again that survived there. Exits 1 where fewer than 97 % are
killed.

Operators: numbers +1 and -1, comparisons, `and` and `or`, True and False, `not`, binary and unary operators, break
and continue, exceptions, loops that never run. Left out, as cosmic-ray makes them: removed decorators (they delete
a rule), and `is` for `==` and back (the same on None and small integers). Left out by place: the examples of a
rule (@bad, @good) and what only they are made with, annotations, which are never evaluated, and in frame.py all but
Context and Rule.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from random import Random
from typing import Any

import mutant as mutant_tests
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

CHECKOUT = Path(__file__).resolve().parent.parent
RULES = Path("dsrun/config/rules")
DATA = ("__init__", "examples", "signatures", "chinese")
"""Modules without a rule: the list of them, what they and their examples take from tables, their explanations."""

FAMILIES = {
    "NumberReplacer": "numbers",
    "ReplaceComparisonOperator": "comparisons",
    "ReplaceBinaryOperator": "binary operators",
    "ReplaceUnaryOperator": "unary operators",
    "ReplaceAndWithOr": "and, or",
    "ReplaceOrWithAnd": "and, or",
    "ReplaceTrueWithFalse": "True, False",
    "ReplaceFalseWithTrue": "True, False",
    "AddNot": "not",
    "ReplaceBreakWithContinue": "break, continue",
    "ReplaceContinueWithBreak": "break, continue",
    "ExceptionReplacer": "exceptions",
    "ZeroIterationForLoop": "loops",
}
SAME = re.compile("Operator_(Is_Eq|IsNot_NotEq|Eq_Is|NotEq_IsNot)$")
OTHER_TESTS = (
    "tests/config/rules",
    "--ignore=tests/config/rules/test_signatures.py",
    "tests/config/validation/test_report.py",
    "tests/config/validation/test_validate_text.py",
)
LONGEST_S = 300
FORK = multiprocessing.get_context("fork")
WANTED = 97.0
Position = tuple[int, int]


@dataclass
class Mutant:
    """One change: the operator's occurrence in a module; what it comes to; who killed it ("" for nobody)."""

    module: str
    operator: str
    occurrence: int
    diff: str = ""
    killed_by: str = ""

    @property
    def family(self) -> str:
        return FAMILIES[self.operator.partition("_")[0]]

    @property
    def path(self) -> Path:
        return file_of(self.module)


def file_of(module: str) -> Path:
    """The file of a module, in a checkout: dsrun/config/rules/zero/buckets.py of `zero.buckets`."""
    return RULES / f"{module.replace('.', '/')}.py"


def modules(folder: Path) -> list[str]:
    """The modules whose mutants are made, as `zero.buckets`."""
    rules = folder / RULES
    paths = (path for path in rules.rglob("*.py") if path.stem not in DATA)
    return sorted(".".join(path.relative_to(rules).with_suffix("").parts) for path in paths)


@functools.cache
def operators() -> dict[str, Any]:
    """cosmic-ray's operators that are used, by name."""
    names = (name for name in plugins.operator_names() if not SAME.search(name))
    short = ((name.removeprefix("core/"), name) for name in names)
    return {name: plugins.get_operator(full)() for name, full in short if name.partition("_")[0] in FAMILIES}


def examples(tree: ast.AST) -> Iterator[ast.expr]:
    """Examples in @bad and @good above a rule."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            calls = (call for call in node.decorator_list if isinstance(call, ast.Call))
            yield from (
                each for call in calls if names(call.func).keys() & {"bad", "good"} for each in call.args
            )


def annotations(tree: ast.AST) -> Iterator[ast.expr | None]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.returns
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            yield node.annotation


def names(node: ast.AST) -> Counter[str]:
    """Number of times that each name is read in a piece of code."""
    return Counter(item.id for item in ast.walk(node) if isinstance(item, ast.Name))


def makers(tree: ast.Module) -> list[ast.stmt]:
    """A module's own functions and tables that its examples alone are made with."""
    made = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.decorator_list
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            made[node.targets[0].id] = node
    given = sum(map(names, examples(tree)), Counter())
    found: dict[str, ast.stmt] = {}
    while more := {
        name: node
        for name, node in made.items()
        if name not in found
        and (inside := given + sum(map(names, found.values()), Counter()))[name]
        and inside[name] == names(tree)[name] - isinstance(node, ast.Assign)
    }:
        found |= more
    return list(found.values())


def left_out(source: str, module: str) -> list[tuple[Position, Position]]:
    """Places where nothing is changed: from a position to one, by line and column."""
    tree = ast.parse(source)
    nodes = [*examples(tree), *annotations(tree), *makers(tree)]
    if module == "frame":
        kept = ("Context", "Rule")
        nodes += [node for node in tree.body if getattr(node, "name", None) not in kept]
    return [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in nodes if node
    ]


def mutants_of(folder: Path, module: str) -> Iterator[Mutant]:
    """Every mutant of a module."""
    source = (folder / file_of(module)).read_text(encoding="utf-8")
    out = left_out(source, module)
    nodes = list(ast_nodes(get_ast(source)))
    for name, operator in operators().items():
        places = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, place in enumerate(places):
            if not any(first <= place < last for first, last in out):
                yield Mutant(module, name, occurrence)


def drawn(found: list[Mutant], share: float, seed: int, sources: dict[str, str]) -> list[Mutant]:
    """A share of a module's mutants, each of them a program that differs."""
    mixed = Random(f"{seed}/{found[0].module}").sample(found, len(found))
    wanted = max(1, round(len(found) * share))
    kept: list[Mutant] = []
    for mutant in mixed:
        if len(kept) < wanted and runs(mutated(mutant, sources[mutant.module]), sources[mutant.module]):
            kept.append(mutant)
    return kept


def mutated(mutant: Mutant, source: str) -> str:
    """The text of a mutant's module."""
    return _changed(source, mutant.operator, mutant.occurrence)


@functools.cache
def _changed(source: str, operator: str, occurrence: int) -> str:
    text: str | None = mutate_code(source, operators()[operator], occurrence)
    if text is None:
        raise SystemExit(f"there is no occurrence {occurrence} of {operator}")
    return text


def runs(text: str, source: str) -> bool:
    """Whether it is Python, and not the same as before."""
    try:
        return ast.dump(ast.parse(text)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def diff(before: str, after: str) -> str:
    """The lines that changed, without those around them."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def copied(folder: Path) -> Path:
    """A copy of the project's code and tests."""
    kept = ("dsrun", "tests", "presets", "bench", "setup.cfg", "pyproject.toml")
    for name in kept:
        place = CHECKOUT / name
        if place.is_dir():
            shutil.copytree(place, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        elif place.exists():
            shutil.copy2(place, folder / name)
    return folder


def judge(folder: Path, mutant: Mutant, source: str) -> str:
    """The check that kills a mutant; "" where it survives."""
    place = folder / mutant.path
    before = place.stat()
    text = mutated(mutant, source)
    mutant.diff = diff(source, text)
    try:
        place.write_text(text, encoding="utf-8")
        return forked(folder, mutant.module) or under_pytest(folder)
    finally:
        # With its old time what was compiled of it is still good.
        place.write_text(source, encoding="utf-8")
        os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))


def forked(folder: Path, module: str) -> str:
    """Answer of bench/mutant.py for a folder; "" where all of it passes."""
    queue = FORK.SimpleQueue()
    process = FORK.Process(target=_tell, args=(queue, folder, module))
    process.start()
    process.join(LONGEST_S)
    if process.is_alive():
        process.kill()
        process.join()
    said = "" if queue.empty() else queue.get()
    return said or (f"exit code {process.exitcode}" if process.exitcode else "")


def _tell(queue: SimpleQueue, folder: Path, module: str) -> None:
    with Path(os.devnull).open("w", encoding="utf-8") as nothing, redirect_stderr(nothing):
        try:
            mutant_tests.main(folder, module)
        except BaseException as error:
            queue.put(f"{type(error).__name__}: {error}"[:300])


def under_pytest(folder: Path) -> str:
    """Failure of the other tests of the rules; "" where they pass."""
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *OTHER_TESTS]
    settings = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=settings, capture_output=True, text=True, check=False, timeout=LONGEST_S
        )
    except subprocess.TimeoutExpired:
        return f"took over {LONGEST_S} s"
    return done.stdout.strip().splitlines()[-1] if done.returncode else ""


def judge_all(folder: Path, asked: Iterable[Mutant], sources: dict[str, str]) -> None:
    """Judge each by itself, with a line on each that survives."""
    began = time.monotonic()
    for number, mutant in enumerate(asked, 1):
        mutant.killed_by = judge(folder, mutant, sources[mutant.module])
        if not mutant.killed_by:
            print(f"\nsurvives: {mutant.module} {mutant.operator} {mutant.occurrence}\n{mutant.diff}")
        if number % 25 == 0:
            print(f"{number} in {time.monotonic() - began:.0f} s", flush=True)


def share(found: Iterable[Mutant]) -> tuple[int, int, str]:
    """(killed, all, "97.3 %")"""
    mutants = list(found)
    killed = sum(bool(mutant.killed_by) for mutant in mutants)
    return killed, len(mutants), f"{100 * killed / len(mutants):.1f} %" if mutants else ""


def table(mutants: list[Mutant], key: str, made: Counter[str]) -> list[str]:
    """Killed of all, by module or by family."""
    rows = [f"| {key} | there are | drawn | killed | survived | share killed |", "| --- " * 6 + "|"]
    for name in sorted(made):
        killed, drawn_, part = share(mutant for mutant in mutants if getattr(mutant, key) == name)
        rows.append(f"| {name} | {made[name]} | {drawn_} | {killed} | {drawn_ - killed} | {part} |")
    return rows


def page(mutants: list[Mutant], made: dict[str, Any]) -> str:
    """The page for docs/reference."""
    killed, drawn_, part = share(mutants)
    there = Counter(made["by_module"])
    lines = [
        "# The rules, mutated",
        "",
        f"Made by `python bench/mutation.py --sample {made['sample']} --seed {made['seed']}` on {made['date']}: "
        f"cosmic-ray {version('cosmic-ray')}, Python {platform.python_version()}.",
        "",
        "One place of a rule is changed: a number by 1, a comparison, `and` and `or`, `not`, an operator, a loop. A "
        "test has to notice. The changes are made in a copy of the project, one at a time, in all modules of "
        "`dsrun/config/rules` that hold rules, in `common.py`, and in `Context` and `Rule` of `frame.py`; the same "
        "share of each module's is drawn. A mutant is killed where a line of `tests/config/expected`, a message in "
        "`tests/config/wording.txt`, an example of a rule, a measured config (`tests/config/known`) or another test of "
        "findings fails, or takes over 20 s.",
        "",
        "Not changed: the examples that a rule carries and what they are made with, annotations, `is` to `==` and "
        "back; no rule is removed.",
        "",
        f"**{killed} of {drawn_} are killed: {part}** (of {there.total()} there are). Wanted: {WANTED:.0f} %. The "
        f"survivors stand in `bench/results/{results(made).name}`.",
        *(["", made["history"]] if made.get("history") else []),
        "",
        *table(mutants, "module", there),
        "",
        *table(mutants, "family", Counter(made["by_family"])),
        "",
        "To run it: `pip install cosmic-ray`, then the command above, for one module with `--module zero.stages`, or "
        "with `--again` and the file of results for its survivors alone. A mutant takes 1 s to 2 s, a survivor 15 s.",
    ]
    return "\n".join([*lines, ""])


def results(made: dict[str, Any]) -> Path:
    return CHECKOUT / "bench/results" / f"mutation-{made['date']}.json"


def draw(arguments: argparse.Namespace, sources: dict[str, str], every: list[Mutant]) -> list[Mutant]:
    """Draw the same share of each module's mutants."""
    part = min(1.0, arguments.sample / len(every))
    there = [[mutant for mutant in every if mutant.module == module] for module in sources]
    return [mutant for found in there if found for mutant in drawn(found, part, arguments.seed, sources)]


def lines_of(found: str) -> str:
    """A diff without its line numbers."""
    return "\n".join(line for line in found.splitlines() if not line.startswith("@@"))


def today(mutant: Mutant, every: list[Mutant], source: str) -> Mutant | None:
    """The mutant that makes the same change now, where others of its module have come or gone; None if none does."""
    alike = [other for other in every if (other.module, other.operator) == (mutant.module, mutant.operator)]
    alike.sort(key=lambda other: abs(other.occurrence - mutant.occurrence))
    wanted = lines_of(mutant.diff)
    return next((other for other in alike if lines_of(diff(source, mutated(other, source))) == wanted), None)


def read(path: Path, sources: dict[str, str], every: list[Mutant]) -> tuple[list[Mutant], dict[str, Any]]:
    """The mutants of an earlier run that can still be made, where they are now, and how they were chosen."""
    said = json.loads(path.read_text(encoding="utf-8"))
    before = [Mutant(**fields) for fields in said.pop("mutants")]
    mutants: list[Mutant] = []
    for found in before:
        # Rules move, and so do places in them.
        now = today(found, every, sources[found.module]) if found.module in sources else None
        if now:
            mutants.append(replace(found, occurrence=now.occurrence))
        else:
            print(f"not there any more: {found.module} {found.operator} {found.occurrence}\n{found.diff}")
    killed, drawn_, part = share(before)
    fair = "then tests were added for survivors, so this share is the fair one. Another seed draws others."
    gone = f"Left out are {drawn_ - len(mutants)} whose line of code is another one now."
    said.setdefault("history", f"At first {killed} of {drawn_} ({part}); {fair} {gone}")
    return mutants, said


def write(mutants: list[Mutant], made: dict[str, Any], output: Path) -> None:
    """The results, then the page."""
    whole = {**made, "mutants": [asdict(mutant) for mutant in mutants]}
    results(made).write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    output.write_text(page(mutants, made), encoding="utf-8")


def main() -> None:
    """Draw, judge, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=500, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--module")
    parser.add_argument("--again", type=Path, metavar="RESULTS")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dsrun-mutation-") as name:
        folder = copied(Path(name))
        sources = {
            module: (folder / file_of(module)).read_text(encoding="utf-8") for module in modules(folder)
        }
        mutant_tests.prepare(folder)
        if failure := forked(folder, "frame") or under_pytest(folder):
            raise SystemExit(f"the tests fail without a change: {failure}")
        sys.dont_write_bytecode = True
        every = [
            mutant
            for module in sources
            if arguments.module in (None, module)
            for mutant in mutants_of(folder, module)
        ]
        made = {"date": str(date.today()), "sample": arguments.sample, "seed": arguments.seed}
        if arguments.again:
            mutants, made = read(arguments.again, sources, every)
        else:
            mutants = draw(arguments, sources, every)
        made["by_module"] = Counter(mutant.module for mutant in every)
        made["by_family"] = Counter(mutant.family for mutant in every)
        asked = [mutant for mutant in mutants if not mutant.killed_by]
        print(f"{len(asked)} to judge", flush=True)
        judge_all(folder, asked, sources)
    print(page(mutants, made))
    if arguments.output:
        write(mutants, made, arguments.output)
    killed, drawn_, part = share(mutants)
    if 100 * killed < WANTED * drawn_:
        raise SystemExit(f"{part} killed, wanted {WANTED:.0f} %")


if __name__ == "__main__":
    main()
