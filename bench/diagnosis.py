"""Accuracy and speed of `dsrun diagnose` on logs.

    python bench/diagnosis.py --logs LOGS.json       named, abstained and wrong, with and without a log's own examples
    python bench/diagnosis.py --held-out LOGS.jsonl  logs that no signature was written from, by their sets
    python bench/diagnosis.py --gigabytes 2          large logs, beside `grep -c -i error`; those without any line twice
                                                     are a quarter as large
    python bench/diagnosis.py ... --output PAGE      write it as docs/reference/diagnosis-measured.md; KEPT stays

LOGS.json is a list of objects with "text" and the true "class". Left out are, for each log, the signatures whose
examples stand in that very log. A line of LOGS.jsonl has "text", "set", "kind" ("failure"; "tail": an end without its
cause; "healthy") and of a failure "cause" and "also" (classes that are right, too).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dsrun.files import write_atomic  # noqa: E402
from dsrun.jobs.diagnosis.reading.log_lines import peeled, pieces  # noqa: E402
from dsrun.jobs.diagnosis.signatures import FailureSignature, SignatureIndex, find_signatures  # noqa: E402
from dsrun.jobs.diagnosis.verdict import Verdict, judge  # noqa: E402

UNKNOWN = {"abort_unknown", "cuda_unknown", "only_tail"}
"""Classes of logs that don't say their cause: naming none is right."""
PLANTED = (
    "[rank3]: Traceback (most recent call last):\n"
    '[rank3]:   File "/home/user/train.py", line 99, in main\n'
    "[rank3]: OSError: [Errno 28] No space left on device\n"
)
AT = 0.4
KEPT = "## At first sight"
"""The heading from which a page is kept as it is: figures that can be taken only once."""
LEFT_OUT: dict[str, Callable[[Iterable[bool]], bool] | None] = {
    "all": None,
    "without those whose every example is from this log": all,
    "without those of which any example is from this log": any,
}
"""Names of what is left out, and of how many examples that asks. The second leaves in those that were given another
example, in words of our own; the third leaves out what everybody would write, such as NCCL's time-out."""


def verdict_on(text: str, signatures: Mapping[str, FailureSignature]) -> Verdict:
    lines = text.replace("\r", "\n").split("\n")
    return judge(
        [peeled(0, number, piece) for number, line in enumerate(lines, 1) for piece in pieces(line)],
        SignatureIndex(signatures),
    )


def without_own(
    text: str, signatures: Mapping[str, FailureSignature], stands: Callable[[Iterable[bool]], bool]
) -> dict[str, FailureSignature]:
    """The signatures of which not `all` (or not `any`) examples stand in this log."""
    squeezed = " ".join(text.split())

    def known_elsewhere(one: FailureSignature) -> bool:
        return not stands(" ".join(example.split())[:120] in squeezed for example in one.examples)

    return {id_: one for id_, one in signatures.items() if known_elsewhere(one)}


def outcome(verdict: Verdict, true_class: str) -> str:
    if verdict.cause is None:
        return "rightly none" if true_class in UNKNOWN else "abstained"
    return "named" if verdict.cause == true_class else "wrong"


def judged(logs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Both figures, as rows of a table."""
    signatures = find_signatures()
    yield "| signatures | named | rightly none | abstained | wrong | wrong with high confidence |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for title, leave_out in LEFT_OUT.items():
        counts: Counter[str] = Counter()
        for log in logs:
            known = without_own(log["text"], signatures, leave_out) if leave_out else signatures
            verdict = verdict_on(log["text"], known)
            said = outcome(verdict, log["class"])
            counts[said] += 1
            counts["surely wrong"] += said == "wrong" and verdict.confidence == "high"
            if said in ("wrong", "abstained"):
                print(f"{title}: {log.get('file', '')} {log['class']} -> {verdict.cause}", file=sys.stderr)
        cells = [counts[name] for name in ("named", "rightly none", "abstained", "wrong", "surely wrong")]
        yield f"| {title} | {' | '.join(map(str, cells))} |"


def held_out(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Logs that no signature was written from, as rows of a table, a set each."""
    signatures = find_signatures()
    yield "| set | failures | named | abstained | wrong | wrong with high confidence | other logs | of them named |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name in sorted({row["set"] for row in rows}):
        counts: Counter[str] = Counter()
        for row in (row for row in rows if row["set"] == name):
            verdict = verdict_on(row["text"], signatures)
            if row["kind"] != "failure":
                counts["others"] += 1
                counts["named others"] += verdict.cause is not None
                continue
            said = outcome(verdict, row["cause"])
            said = "named" if verdict.cause in row["also"] else said
            counts[said] += 1
            counts["surely wrong"] += said == "wrong" and verdict.confidence == "high"
        said = [
            counts[one] for one in ("named", "abstained", "wrong", "surely wrong", "others", "named others")
        ]
        yield f"| {name} | {sum(said[:3])} | {' | '.join(map(str, said))} |"


def steps(draw: random.Random) -> Iterator[str]:
    """A training's lines."""
    for step in count(1):
        day = f"2026-01-{step // 86400 % 28 + 1:02d}"
        clock = f"{day} {step // 3600 % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d}"
        yield (
            f"[rank{step % 8}]: [{clock},{step % 1000:03d}] [INFO] [engine.py:123:step] step={step}, "
            f"loss={draw.random() * 3:.4f}, lr=1.2e-05, samples/sec={draw.random() * 90:.2f}\n"
        )


def names(draw: random.Random) -> Iterator[str]:
    """Lines of names that nobody knows: keys, and words of any letters."""
    letters = (b"abcdefghijklmnopqrstuvwxyz    " * 9)[:256]
    while True:
        yield f"{draw.randbytes(16).hex()} {draw.randbytes(60).translate(letters).decode()}\n"


def prose(draw: random.Random) -> Iterator[str]:
    """Lines of words in any order, from dsrun's own explanations: of memory, checkpoints, errors and hosts."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/explanation").glob("*.md"))]
    known = re.findall(r"[A-Za-z,.]+", " ".join(texts))
    while True:
        yield f"{' '.join(draw.choices(known, k=12))}\n"


KINDS: dict[str, tuple[Callable[[random.Random], Iterator[str]], float]] = {
    "steps of a training": (steps, 1.0),
    "keys and words that nobody knows": (names, 0.25),
    "words of dsrun's own explanations": (prose, 0.25),
}
"""What the lines of a large log are, and its share of the size that was asked for."""


def make_large(path: Path, size: float, lines: Iterator[str]) -> None:
    """A log with one failure at AT of it, and its end."""
    written, planted = 0, False
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            written += file.write("".join(islice(lines, 5000)))
            if not planted and written > AT * size:
                planted = bool(file.write(PLANTED))
        file.write("['python', 'train.py', '--local_rank=3'] exits with return code = 1\n")


def seconds(command: Sequence[str]) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return time.perf_counter() - began, done.stdout


def timed(gigabytes: float) -> Iterator[str]:
    """Large logs: what was found, how long it took beside grep, and the largest process so far."""
    yield "| lines | GB | cause | rank | s | `grep -c -i error`, s | times | largest process, MB |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    with tempfile.TemporaryDirectory() as folder:
        for title, (lines, share) in KINDS.items():
            path, size = Path(folder) / "train.log", gigabytes * share
            make_large(path, size * 1e9, lines(random.Random(1)))
            seconds(["wc", "-c", str(path)])  # so that both read from memory
            grep, own = ["grep", "-c", "-i", "error", str(path)], [sys.executable, "-m", "dsrun", "diagnose"]
            # By turns: what else the machine does meets both.
            tries = [(seconds(grep)[0], *seconds([*own, str(path), "--json"])) for _ in range(3)]
            with_grep, best = min(one[0] for one in tries), min(one[1] for one in tries)
            found = json.loads(tries[0][2])
            most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            said = f"`{found['cause']}` | {found['rank']} | {best:.1f} | {with_grep:.1f} | {best / with_grep:.1f}"
            yield f"| {title} | {size:g} | {said} | {most:.0f} |"
    engine = "with" if importlib.util.find_spec("hyperscan") else "without"
    yield ""
    yield f"A full disk is planted at {AT:.0%}. The best of three each, by turns; {engine} Hyperscan (`dsrun[logs]`)."


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--gigabytes", type=float)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    lines = ["# What dsrun diagnose names, and how fast", ""]
    lines += [
        f"Made by `python bench/diagnosis.py` on {datetime.datetime.now(tz=datetime.timezone.utc):%Y-%m-%d}.",
        "",
    ]
    if given.logs:
        logs = json.loads(given.logs.read_text(encoding="utf-8"))
        known = len(find_signatures())
        lines += [
            f"{len(logs)} real logs, whose causes are known from their threads, with {known} signatures:",
            "",
        ]
        lines += [*judged(logs), ""]
        lines += [
            "Their writer had read these logs, and gave some signatures a second example in other words: what nobody",
            "has seen is named less often than the second row says, and more often than the third.",
            "",
        ]
    if given.held_out:
        rows = [json.loads(row) for row in given.held_out.read_text(encoding="utf-8").splitlines()]
        lines += [
            f"{len(rows)} logs that were held out, with the signatures of today, which were changed for them since:",
            "",
        ]
        lines += [*held_out(rows), ""]
    if given.gigabytes:
        lines += [*timed(given.gigabytes), ""]
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if given.output:
        old = given.output.read_text(encoding="utf-8") if given.output.is_file() else ""
        text += "\n" + old[old.index(KEPT) :] if KEPT in old else ""
        write_atomic(given.output, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
