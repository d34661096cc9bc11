"""DS02x: the text itself. DeepSpeed reads Hjson; HF Trainer, accelerate and Lightning read JSON.

These rules look at what the reader of the file (dsrun/config/reading/document.py) noted; their examples are texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dsrun.config.rules.common import printing_off
from dsrun.config.rules.frame import (
    DIFFERS,
    REFUSED,
    UNREADABLE,
    Context,
    Edit,
    Finding,
    Fix,
    bad,
    good,
    rule,
)
from dsrun.errors import Problem

if TYPE_CHECKING:
    from dsrun.config.reading.document import SyntaxIssue

IGNORE = "_dsrun_ignore"
DUPLICATE = "duplicate-key"
LITERAL = "python-literal"
NUMBERS = ("non-finite", "big-number")
MARK = "bom"
ROOT = '"train_micro_batch_size_per_gpu": 1'
AUTOS = '"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"'
AUTOS += ', "train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2'


def raw(text: str) -> str:
    """An example's text, with what every config needs in place of <>."""
    return text.replace("<>", ROOT)


def autos(text: str) -> str:
    """An example's text for HF Trainer; <> becomes a beginning that ends inside zero_optimization."""
    return text.replace("<>", AUTOS)


@rule("DS020", REFUSED)
@bad({"_text": "{"}, {"_text": "[1, 2]"})
@good({"_text": raw("{<>}")})
def unreadable_file(context: Context) -> Iterator[Finding]:
    """Neither Hjson nor JSON: DeepSpeed stops with hjson's own error, or treats the path as base64.

    Source: DeepSpeedConfig.__init__ in runtime/config.py.
    """
    for issue in _of(context, UNREADABLE):
        message, _, advice = issue.message.partition("\n")
        yield Finding("", message, advice or "Fix that first; the rest can be checked afterwards.")


@rule("DS021", REFUSED)
@bad({"_for": "hf", "_text": autos("{<>} // why\n}")}, {"_for": "hf", "_text": autos("{<>},}")})
@good({"_for": "hf", "_text": autos("{<>}}")}, {"_text": raw("{<> // why\n}")})
def not_json(context: Context) -> Iterator[Finding]:
    """HF Trainer reads the file with Python's json, which allows no comments and no trailing comma.

    Source: HfDeepSpeedConfig.__init__ in accelerate/utils/deepspeed.py; Lightning does the same.
    """
    if context.target != "deepspeed":
        for issue in context.issues:
            if issue.kind not in (DUPLICATE, *NUMBERS):
                advice = "Write JSON: " + ADVICE.get(issue.kind, "write it as JSON has it") + "."
                fix = Fix((Edit("plain", ""),), safe=issue.kind != "comment")
                yield Finding(issue.path, f"{issue.message}, where a JSON reader stops", advice, fix)


@rule("DS022", DIFFERS)
@bad(
    {"_text": '{"train_batch_size": 4, "train_batch_size": 8}'},
    {"_for": "hf", "_text": autos('{<>, "stage": 3, "stage3_gather_16bit_weights_on_model_save": true}}')},
)
@good({"_text": '{"train_batch_size": 4}'})
def duplicate_key(context: Context) -> Iterator[Finding]:
    """DeepSpeed refuses it (dict_raise_error_on_duplicate_keys, runtime/config_utils.py); json keeps the last."""
    stops = context.target == "deepspeed"
    for issue in _of(context, DUPLICATE):
        then = "DeepSpeed stops" if stops else "only the last one counts"
        fix = Fix((Edit("once", issue.path),)) if issue.equal else None
        effect = REFUSED if stops else DIFFERS
        yield Finding(issue.path, f"{issue.message}: {then}", "Keep one.", fix, effect=effect)


@rule("DS023", DIFFERS)
@bad({"_text": raw("{\n'prescale_gradients': True,\n<>\n}")})
@good({"_text": raw("{\n'prescale_gradients': true,\n<>\n}")})
def python_in_place_of_json(context: Context) -> Iterator[Finding]:
    """In Hjson, which runtime/config.py reads, a bare True is a string up to the end of its line, comma included.

    As the last key of its section it is the string "True", which checked sections convert (DS007).
    """
    if context.target == "deepspeed":
        converted = {violation.path for violation in context.violations if violation.kind == "converted"}
        for issue in _of(context, LITERAL):
            if issue.path not in converted:
                text = f"{issue.message}; DeepSpeed reads a string"
                null = "None" in issue.message
                advice = "Write the value, or leave the key out." if null else "Write true or false."
                yield Finding(issue.path, text, advice, Fix((Edit("plain", ""),), safe=not null))


@rule("DS024", DIFFERS)
@bad({"_for": "hf", "_text": autos('{<>}, "optimizer": {"type": "AdamW", "params": {"lr": NaN}}}')})
@good({"_for": "hf", "_text": autos('{<>}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}')})
def not_a_finite_number(context: Context) -> Iterator[Finding]:
    """NaN and Infinity are numbers for Python's json and strings for Hjson (runtime/config.py): neither trains."""
    for issue in _of(context, *NUMBERS):
        if not printing_off(context, issue.path):
            yield Finding(issue.path, f"{issue.message}: not a usable number", "Write a finite number.")


@rule("DS025", "note")
@bad({"_text": raw("{<> // why\n}")})
@good({"_text": raw("{<>}")})
def only_deepspeed_reads_it(context: Context) -> Iterator[Finding]:
    """DeepSpeed takes Hjson (runtime/config.py); HF Trainer, accelerate, Lightning and editors want JSON."""
    if context.target == "deepspeed":
        for issue in context.issues:
            if issue.kind not in (DUPLICATE, LITERAL, *NUMBERS):
                text = f"{issue.message}: DeepSpeed reads it, but HF Trainer and others read JSON only"
                advice = ADVICE.get(issue.kind, "write it as JSON has it")
                yield Finding(issue.path, text, f"For those, {advice}.")
                return


@rule("DS029", "warning")
@bad({"_dsrun_ignore": ["DS2003"]})
@good({"_dsrun_ignore": {"DS203": "saved elsewhere"}})
def unknown_rule_in_dsrun_ignore(context: Context) -> Iterator[Finding]:
    """dsrun's own comment (dsrun/config/rules/file/text.py): with a typo in it, it silences nothing."""
    from dsrun.config.rules import find_rules

    silenced = ignored(context.config)
    known = {rule.id for rule in find_rules()} if silenced else ()
    for rule_id in silenced:
        if rule_id not in known:
            yield Finding(IGNORE, f"unknown rule {rule_id!r}", "`dsrun explain` lists the rules.")


ADVICE = {
    "comment": 'take the comment out, or keep it as a key: "_comment": "..."',
    "trailing-comma": "take the comma out",
    "missing-comma": "put a comma between the two",
    "unquoted-key": "put the key in double quotes",
    "unquoted-text": "put the text in double quotes",
    "single-quotes": "use double quotes",
    "python-literal": "true, false and null",
    "multiline-text": "put the text on one line, in double quotes",
    "no-braces": "put braces around the whole",
    "bad-number": "write the number with digits, a point and an exponent, such as 0.0001 or 1e-4",
    "bad-escape": "write \\\\ for a backslash",
    MARK: "save the file as UTF-8 without a byte order mark",
}


def _of(context: Context, *kinds: str) -> Iterator[SyntaxIssue]:
    return (issue for issue in context.issues if issue.kind in kinds)


def ignored(config: Mapping[str, Any]) -> list[str]:
    """Rule ids in a config's own "_dsrun_ignore": a list of them, or a section with a reason for each."""
    given = config.get(IGNORE, ())
    given = [given] if isinstance(given, str) else given
    return [item for item in given if isinstance(item, str)] if isinstance(given, (list, dict, tuple)) else []


def unreadable(problem: Problem, name: str) -> SyntaxIssue:
    """The problem that stops the reading of a text, as an issue at its place ("name:line:column" in `where`)."""
    from dsrun.config.reading.document import Span, SyntaxIssue

    line, column = 1, 1
    numbers = problem.where.removeprefix(f"{name}:").split(":")
    if len(numbers) == 2 and all(number.isdigit() for number in numbers):
        line, column = int(numbers[0]), int(numbers[1])
    return SyntaxIssue(UNREADABLE, Span(0, 0, line, column), f"{problem.what}\n{problem.hint}", "")
