"""Whether the tests of the rules notice a change in one module of them: exits 1 at the first that does.

    python bench/mutant.py FOLDER zero

calls the checks of tests/config/test_expected.py, test_rules.py and test_known.py in FOLDER, a copy of the project,
without pytest around them: first the lines and examples of the rules in that module, or in one that imports from it,
then the examples of all others. A test that takes too long is ended by a signal. bench/mutation.py does the same
in a process forked for each change, once `prepare` is done.
"""

from __future__ import annotations

import ast
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

SECONDS = 20
MEMORY = 4 * 1024**3
PACKAGE = "dsrun.config.rules."
Check = tuple[str, Callable[[], None]]
"""The id of a rule, or the begin of one, that a test is about ("" for none); and the test."""


def imported(source: str) -> set[str]:
    """The modules of the rules that a module imports from."""
    names = (node.module or "" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom))
    return {name.removeprefix(PACKAGE) for name in names if name.startswith(PACKAGE)}


def dependants(folder: Path, module: str) -> set[str]:
    """A module and those that import from it, or from one of these."""
    imports = {
        ".".join(path.relative_to(folder).with_suffix("").parts): imported(path.read_text(encoding="utf-8"))
        for path in folder.rglob("*.py")
    }
    found = {module}
    while more := {name for name, others in imports.items() if others & found} - found:
        found |= more
    return found


def of_expected(expected: ModuleType) -> Iterator[Check]:
    """Each line of expected/, its wording, and whether the fixes on it settle what they are for."""
    from expected import recorded

    known = recorded()
    for case in expected.CASES:
        for block in case.blocks:
            yield block, partial(expected.check_findings, case)
            yield block, partial(has_known_wording, known[case.name], case)
    for case in expected.FIXED:
        for block in case.blocks:
            yield block, partial(expected.check_fixes, case)


def has_known_wording(known: set[str], case: Any) -> None:
    assert case.wording() == known


def of_rules(rules: ModuleType) -> Iterator[Check]:
    """Each rule's own examples, and those in files."""
    for pair in rules.BAD:
        yield pair[0].id, partial(rules.check_bad_example, pair)
    for pair in rules.GOOD:
        yield pair[0].id, partial(rules.check_good_example, pair)
    for path in rules.VALID:
        yield "", partial(rules.test_valid, path)
    for path in rules.INVALID:
        yield path.stem.split("-")[0], partial(rules.test_invalid, path)


def of_known(known: ModuleType) -> Iterator[Check]:
    """Configs whose outcome was measured."""
    for case in known.WRONG:
        yield case.get("rules", [""])[0], partial(known.check_wrong, case)
    for case in known.TRICKY:
        yield "", partial(known.check_tricky, case)


def prepare(folder: Path) -> None:
    """Prepare what all runs share, before any rule is imported: schemas are kept, not read for each config anew."""
    sys.path[:0] = [str(folder), str(folder / "tests"), str(folder / "tests/config")]
    import pytest  # noqa: F401

    from dsrun.config.schemas import schema

    schema.load = cache(schema.load)
    for version in (None, *schema.versions()):
        schema.load(version)


def checks(asked: set[str]) -> list[Check]:
    """The tests that could notice a change in some modules, those about their rules first.

    The findings of other rules can't change; that these rules have none on the others' examples can.
    """
    import test_expected
    import test_known
    import test_rules

    from dsrun.config.rules import find_rules

    mine = {rule.id for rule in find_rules() if rule.function.__module__.removeprefix(PACKAGE) in asked}
    about = mine | {rule_id[:4] for rule_id in mine}
    others = [*of_rules(test_rules), *of_known(test_known)]
    expected = [check for check in of_expected(test_expected) if check[0] in about]
    return sorted([*expected, *others], key=lambda check: check[0] not in about)


def main(folder: Path, module: str) -> None:
    """Run them until one fails."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    asked = dependants(folder / "dsrun/config/rules", module)
    signal.alarm(SECONDS)
    for _, check in checks(asked):
        signal.alarm(SECONDS)
        try:
            check()
        except Exception as error:
            raise SystemExit(f"{check.func.__name__}: {told(check)}: {type(error).__name__}") from error


def told(check: Any) -> str:
    """Arguments of a test, for a reader."""
    return json.dumps(check.args[-1], default=str)[:300]


if __name__ == "__main__":
    prepare(Path(sys.argv[1]).resolve())
    main(Path(sys.argv[1]).resolve(), sys.argv[2])
