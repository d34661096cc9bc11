"""Runs every test (`pytest --full`) and writes what came of it into docs/reference/full-tests.md.

python tests/full.py [pytest arguments]
python tests/full.py --from ONE.xml --from ANOTHER.xml     # what `pytest --full --junitxml` wrote, in parts; of a
                                                           # test that stands in several the last one's counts
python tests/full.py --from ONE.xml --of 487               # a part of so many tests, as the page then says
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "full-tests.md"
PACKAGES = ("torch", "deepspeed", "transformers", "peft")


def outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def group(case: ElementTree.Element) -> str:
    """The folder in tests/, or the file where one of them is a subject of its own."""
    words = case.get("classname", "").split(".")[1:]
    return "/".join(words[:2] if words[0] in ("end_to_end", "cluster_lab", "training", "jobs") else words[:1])


def cases_of(files: Iterable[Path]) -> list[ElementTree.Element]:
    """The tests in the files, each once: the last that is told of it."""
    found = {}
    for path in files:
        for case in ElementTree.parse(path).iter("testcase"):
            if case.get("classname"):
                found[case.get("classname"), case.get("name")] = case
    return list(found.values())


def page(files: Iterable[Path], workers: str, of: int | None) -> str:
    """of: how many tests there are, where the files hold a part of them."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failed: list[str] = []
    files = list(files)
    parts = f"{len(files)} runs of that day, the last at " if len(files) > 1 else ""
    cases = cases_of(files)
    for case in cases:
        counts[group(case)][outcome(case)] += 1
        seconds[group(case)] += float(case.get("time", 0))
        if outcome(case) == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        if (skipped := case.find("skipped")) is not None:
            reasons[skipped.get("message", "").partition("\n")[0]] += 1
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    lines = [
        "# The full tests",
        "",
        f"Made by `python tests/full.py` on {date.today()}: {parts}commit {commit}, {packages}, "
        f"Python {platform.python_version()}, {os.cpu_count()} CPU cores, {workers} workers. The default lane leaves "
        "out what is marked `full`: the rest of grids (every launcher with every stage, all ways to resume elsewhere, "
        "all cases of devices).",
        "",
        f"Here are {len(cases)} of {of} tests: the others weren't run that day."
        if of
        else "All of them were run.",
        "Minutes are those of one worker; several run at once.",
        "",
        "| tests | passed | failed | skipped | minutes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in sorted(counts):
        found = counts[name]
        lines.append(
            f"| {name} | {found['passed']} | {found['failed']} | {found['skipped']} | {seconds[name] / 60:.1f} |"
        )
    total = sum(counts.values(), Counter())
    lines.append(
        f"| all | {total['passed']} | {total['failed']} | {total['skipped']} | {sum(seconds.values()) / 60:.1f} |"
    )
    lines += ["", *(f"- failed: `{name}`" for name in failed)] if failed else []
    if reasons:
        lines += ["", "Skipped:", "", *(f"- {count}: {reason}" for reason, count in reasons.most_common())]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="files", action="append", type=Path, default=[], metavar="XML")
    parser.add_argument("--of", type=int, metavar="COUNT")
    given, rest = parser.parse_known_args()
    code, workers = 0, os.environ.get("DSRUN_TEST_WORKERS", "4")
    with tempfile.TemporaryDirectory() as folder:
        if not given.files:
            given.files = [Path(folder) / "results.xml"]
            argv = [sys.executable, "-m", "pytest", "--full", "-n", workers, "--dist", "loadfile", *rest]
            argv += ["--no-loadscope-reorder", f"--junitxml={given.files[0]}"]
            code = subprocess.run(argv, cwd=ROOT, check=False).returncode
        PAGE.write_text(page(given.files, workers, given.of), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
