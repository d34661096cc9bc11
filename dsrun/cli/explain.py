"""`dsrun explain` (configs): what a rule checks, what a key does, a failure, versions, a library's names."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

import click

from dsrun.cli.output.columns import folded, screen_width
from dsrun.cli.output.results import print_json
from dsrun.cli.parsing.completion import explained
from dsrun.errors import DsrunError

if TYPE_CHECKING:
    from dsrun.config.rules import Rule
    from dsrun.versions import Combination

SIGNATURES, VERSIONS = "signatures", "versions"
BROKEN = re.compile(r"(?<=\S)\n(?=[^\s*-])")
"""A line end within a paragraph of a docstring."""
LISTED = 8
"""Columns before the second line of a list's entry."""
LISTS = "`dsrun explain` lists the rules, `dsrun explain signatures` the signatures."


Kind = Literal[
    "rules", "rule", "signatures", "signature", "combinations", "combination", "key", "library name"
]


@click.command("explain")
@click.argument(
    "what", required=False, metavar="[RULE|KEY|SIGNATURE|VERSIONS|NAME]", shell_complete=explained
)
@click.option("--parameter", metavar="NAME", help="A parameter of the function or class that is named.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(what: str | None, parameter: str | None, *, as_json: bool) -> None:
    """Explain a rule, a key of deepspeed.json, a signature of `dsrun diagnose`, versions that don't go together, or
    a name of transformers, torch and the like: which releases have it, and what took its place.
    Without any, list the rules. With a Chinese LANG the commonest rules are explained in Chinese.

    \b
    dsrun explain DS203
    dsrun explain zero_optimization.overlap_comm
    dsrun explain gpu-oom
    dsrun explain signatures      list them
    dsrun explain zero2-small-gradients
    dsrun explain versions        list the versions that don't go together
    dsrun explain transformers.models.llama.modeling_llama.LlamaSdpaAttention
    dsrun explain transformers.TrainingArguments --parameter evaluation_strategy
    """
    answer = explanation(what, parameter)
    if as_json:
        print_json("explanation", asdict(answer))
    else:
        _show(answer)


@dataclass(frozen=True)
class NameExplanation:
    """What a name stands for. The keys of --json are these."""

    kind: Kind
    """What the name is of; combinations are of versions that don't go together."""
    name: str | None
    """The name as it is known; None for the list of rules."""
    lines: Sequence[str]
    """The text. One with line ends in it is a paragraph, or a block of several."""


INDENTS = {
    "rules": 16,
    "rule": 0,
    "signatures": LISTED,
    "combinations": LISTED,
    "combination": 15,
    "library name": 13,
}
"""Columns before the second line of a folded text, where they aren't 4."""


def explanation(what: str | None, parameter: str | None) -> NameExplanation:
    """The explanation of a name. Raises DsrunError where nothing has it."""
    if what and (texts := _of_a_library(what, parameter)):
        return NameExplanation("library name", what, texts)
    if parameter:
        raise DsrunError(
            f"--parameter asks of a function or class, and there are no data of {what or 'none'}",
            hint="Write it with its package, such as transformers.TrainingArguments.",
        )
    from dsrun import versions
    from dsrun.config.rules import find_rules

    rules = {rule.id: rule for rule in find_rules()}
    lines: Iterable[str]
    kind: Kind = "rule"
    name = what
    if what is None:
        kind, lines = "rules", (f"{rule.id}  {rule.severity:9}{rule.about}" for rule in rules.values())
    elif (rule_id := what.upper()) in rules:
        name, lines = rule_id, _rule(rules[rule_id])
    elif rule_id.startswith("DS") and rule_id[2:].isdigit():
        raise DsrunError(f"there is no rule {rule_id}", hint="`dsrun explain` lists them.")
    elif what == SIGNATURES:
        kind, lines = "signatures", _signatures()
    elif what == VERSIONS:
        kind = "combinations"
        lines = (
            f"{name:28}{combination.severity:9}{combination.in_words}: {combination.happens}"
            for name, combination in versions.combinations().items()
        )
    elif what in versions.combinations():
        same = _signature(what)  # a signature may have the name: both are about one thing
        kind = "combination"
        lines = [*_versions(versions.combinations()[what]), *(["", *same] if same else [])]
    elif lines := _signature(what):
        kind = "signature"
    else:
        name = what.removeprefix("$.")
        kind, lines = "key", _key(name)
    return NameExplanation(kind, name, list(lines))


def _show(answer: NameExplanation) -> None:
    """A text, folded at words where stdout is a terminal; not a log's lines, which stand 4 columns in."""
    columns = screen_width()
    for text in answer.lines:
        if columns is None or text.startswith("    "):
            click.echo(text)
            continue
        for line in BROKEN.sub(" ", text).split("\n"):
            click.echo(folded(line, columns, INDENTS.get(answer.kind, 4)))


def _rule(rule: Rule) -> Iterator[str]:
    import os

    from dsrun.config.rules import run
    from dsrun.config.rules.chinese import explanations
    from dsrun.config.rules.frame import EFFECTS, example
    from dsrun.jobs.diagnosis.diagnosis import speaks_chinese

    chinese = explanations().get(rule.id) if speaks_chinese(os.environ) else None
    yield f"{rule.id} ({rule.severity}): {chinese.title if chinese else rule.about}"
    yield ""
    if chinese:
        yield from (chinese.means, "", chinese.next, "")
    yield inspect.cleandoc(rule.source)
    if rule.effect:
        yield ""
        yield EFFECTS[rule.effect]
    for bad in rule.bad:
        yield ""
        yield f"Wrong:  {json.dumps(bad, ensure_ascii=False)}"
        for finding in run(*example(bad)):
            if finding.rule == rule.id:
                yield f"  $.{finding.path}: {finding.message}"
                yield f"  {finding.suggestion}"
    for good in rule.good:
        yield ""
        yield f"Right:  {json.dumps(good, ensure_ascii=False)}"
    yield ""
    yield f'Silence it in one file with "_dsrun_ignore": ["{rule.id}"], in one run with --ignore {rule.id}.'


def _of_a_library(path: str, parameter: str | None) -> list[str]:
    """What the releases say of a name of one of their packages; empty where it is none."""
    from dsrun.releases.packed import package_of

    if package_of(path) is None:
        return []
    from dsrun.releases.words import explained

    return list(explained(path, parameter or ""))


def _signatures() -> Iterator[str]:
    from dsrun.jobs.diagnosis.signatures import HARMLESS, find_signatures

    for signature in sorted(
        find_signatures().values(), key=lambda signature: (signature.subject, signature.id)
    ):
        if signature.kind != HARMLESS:
            yield f"{signature.id:28}{signature.cause:22}{signature.means}"


def _signature(name: str) -> list[str]:
    """A signature in words; empty where there is none of that name."""
    import os

    from dsrun.jobs.diagnosis.diagnosis import speaks_chinese
    from dsrun.jobs.diagnosis.signatures import find_signatures

    signature = find_signatures().get(name)
    if signature is None:
        return []
    chinese = speaks_chinese(os.environ)
    again = "starting again may help" if signature.retry else "starting again as it is won't help"
    parts = {
        "Cause": f"{signature.cause} ({signature.kind}); {again}",
        "May be": "; ".join(signature.causes),
        "Tell apart": signature.tell_apart,
        "Make sure": signature.check,
        "Next": (chinese and signature.next_zh) or signature.next,
        "Versions": signature.versions_in_words,
        "Source": signature.source,
    }
    rows = [f"{name}: {text}" for name, text in parts.items() if text]
    examples = [f"    {line}" for example in signature.examples for line in example.split("\n")]
    return [
        f"{signature.id}: {(chinese and signature.means_zh) or signature.means}",
        "",
        *rows,
        "",
        "In a log:",
        *examples,
    ]


def _versions(combination: Combination) -> Iterator[str]:
    from dsrun.versions import SEVERITIES

    yield f"{combination.name} ({combination.severity}: {SEVERITIES[combination.severity]})"
    yield ""
    yield f"Versions:      {combination.in_words}"
    if combination.when:
        yield f"When:          {combination.when}"
    yield f"What happens:  {combination.happens}"
    yield f"What to do:    {combination.do}"
    yield f"Known from:    {combination.basis}"
    yield from (f"               {source}" for source in combination.sources)
    if combination.rule:
        yield f"In configs:    rule {combination.rule}"


def _key(path: str) -> Iterator[str]:
    from dsrun.config import tree
    from dsrun.config.schemas import schema
    from dsrun.config.schemas.guess import guess
    from dsrun.releases.config_changes import key_record
    from dsrun.releases.packed import package

    known = schema.load()
    node = known.node(path)
    record = key_record(package("deepspeed"), known.canonical(path))
    if not node:
        if advice := known.removed(path):
            last = f": {record.until} is the last release with it" if record and record.until else ""
            raise DsrunError(f"{path} was removed from DeepSpeed{last}", hint=advice)
        near = guess(known, path)
        raise DsrunError(
            f"{path} is neither a rule, nor a key of DeepSpeed, nor a signature",
            hint=near.advice if near.path or near.stray else LISTS,
        )
    default, does = known.describe(path)
    yield f"{path}: {schema.expected(node)}"
    yield f"  {does}"
    if default is not tree.MISSING:
        yield f"  Left out, it is {json.dumps(default)}."
    if record and record.former:
        yield f"  Left out, it was {'; '.join(f'{value} in {when}' for value, when in record.former)}."
    if known.is_auto(path):
        yield '  HF Trainer fills in "auto".'
    if name := node.get("x-alias-of"):
        yield f"  Another name of {name}."
    if record and record.alternating:
        yield f"  These releases of DeepSpeed have it: {record.alternating}."
    elif record and record.since:
        yield f"  DeepSpeed has it since {record.since}."
