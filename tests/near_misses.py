"""Logs that look like a signature's example and mean something else, made from the example by rules.

python tests/near_misses.py SIGNATURE    print those of a signature, to write some of its own by
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator

from dsrun.jobs.diagnosis.reading.log_lines import peeled
from dsrun.jobs.diagnosis.signatures import FailureSignature, find_signatures

OWN_FRAME = 'Traceback (most recent call last):\n  File "/home/u/study.py", line 12, in main\n    {code}\n'
STEPS = "".join(f"step={number} loss=2.{number:02d} lr=1e-5\n" for number in range(30))
TYPE = re.compile(r"^(?:[\w.]{1,100}\.)?\w{1,60}(?:Error|Exception): ")


def matched(signature: FailureSignature) -> str:
    """The first line of the examples that the pattern is in, without prefixes."""
    lines = (line for example in signature.examples for line in example.split("\n"))
    return next(peeled(0, 0, line).text.strip() for line in lines if signature.compiled.search(line))


def told(signature: FailureSignature) -> str:
    """A line that speaks of the failure as a program goes on."""
    logged = "[2026-01-02 03:04:05,678] [INFO] [guide.py:7:main]"
    return f"{logged} if you see: {matched(signature)}, read the guide\n{STEPS}"


def in_code(signature: FailureSignature) -> str:
    """Source code that would say it, above an exception of the script's own."""
    line = matched(signature).replace('"', "'")
    return (
        f"{OWN_FRAME.format(code=f'text = known[name]  # {line}')}KeyError: 'sheet'\n"
        f'    raise RuntimeError("{line}")'
    )


def of_own_check(signature: FailureSignature) -> str:
    """An exception of the user's own check, which quotes the words."""
    words = TYPE.sub("", matched(signature))
    return f'{OWN_FRAME.format(code="raise StudyError(found[0])")}StudyError: row 3 of the table of texts has "{words}"'


def in_another_order(signature: FailureSignature) -> str:
    """The words of the line in another order, after an exception that is something else."""
    words = matched(signature).split()
    random.Random(signature.id).shuffle(words)
    raised = f"{OWN_FRAME.format(code='total = part / count')}ZeroDivisionError: division by zero"
    return f"{raised}\nnotes: {' '.join(words)}"


def as_data(signature: FailureSignature) -> str:
    """A record of training data that a script prints."""
    line = matched(signature).replace('"', "'")
    return f'{{"prompt": "What does this mean?", "text": "{line}", "label": 3}}\n{STEPS}'


def denied(signature: FailureSignature) -> str:
    """A line that says that it did not happen."""
    words = signature.compiled.search(matched(signature)) or signature.compiled.search(signature.examples[0])
    return (
        f"self-check: no {words[0].strip() if words else matched(signature)} since the start\nself-check done"
    )


def of_another_package(signature: FailureSignature) -> str:
    """An exception of a package that has nothing to do with it, which quotes the words."""
    words = TYPE.sub("", matched(signature))
    frame = '  File "/opt/env/lib/python3.11/site-packages/frobtext/parser.py", line 90, in parse\n    raise Bad(row)\n'
    raised = f'frobtext.parser.ParseError: row 3 is no pair: "{words}"'
    return f"{OWN_FRAME.format(code='rows = parse(text)')}{frame}{raised}"


def before_many_steps(signature: FailureSignature) -> str:
    """The line, after which the job trained on for long, and then failed by something else."""
    other = f"{OWN_FRAME.format(code='total = part / count')}ZeroDivisionError: division by zero"
    return f"{matched(signature)}\n{STEPS}{other}"


def before_the_end(signature: FailureSignature) -> str:
    """The line, after which the job trained on and came to its end."""
    return f"{matched(signature)}\n{STEPS}{{'train_runtime': 12.1, 'train_loss': 2.1}}\nTraining completed."


def in_a_list(signature: FailureSignature) -> str:
    """A row of a table of failures that a program prints, with a number before it."""
    return f"known failures:\n  17) | {matched(signature)} | see chapter 3 |\n{STEPS}"


def in_an_option(signature: FailureSignature) -> str:
    """The value of an option in a command line that is shown."""
    words = matched(signature).replace("'", "")
    return f"+ python train.py --note '{words}' --epochs 3\n{STEPS}"


def in_a_report(signature: FailureSignature) -> str:
    """The short summary of a test run."""
    return f"PASSED tests/test_words.py::test_text[{matched(signature)}]\n3 passed in 1.2s"


KINDS: tuple[Callable[[FailureSignature], str], ...] = (
    told,
    in_code,
    of_own_check,
    in_another_order,
    as_data,
    denied,
    of_another_package,
    before_many_steps,
    before_the_end,
    in_a_list,
    in_an_option,
    in_a_report,
)


def near_misses(signature: FailureSignature) -> Iterator[tuple[str, str]]:
    """The name of each kind, and the log; first those that its table has."""
    for number, text in enumerate(signature.near_misses, 1):
        yield f"near_misses[{number}]", text
    for kind in KINDS:
        yield kind.__name__, kind(signature)


if __name__ == "__main__":
    for name, text in near_misses(find_signatures()[sys.argv[1]]):
        print(f"--- {name}\n{text}")
