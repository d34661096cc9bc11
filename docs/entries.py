"""A page for each rule and each signature, in one form; the site has them, and `dsrun explain` shows them elsewhere.

They are made as the site is built (docs/hooks.py): checked in, 700 files that follow from the code would hide what a
diff is about.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dsrun.config import rules
from dsrun.config.rules.frame import EFFECTS
from dsrun.jobs.diagnosis.signatures import HARMLESS, FailureSignature, find_signatures

RULES, SIGNATURES = "reference/rules.md", "reference/signatures.md"
"""The indexes."""
EXAMPLES = 3
"""Wrong and right examples of a rule that its page shows, at most."""
SAFETY = {
    True: "Safe: `dsrun validate --fix` writes it; it changes nothing but what is wrong.",
    False: "It may need a second look: `dsrun validate --fix --unsafe-fixes` writes it.",
    None: "None is written for you: what is right depends on what you want.",
}


def pages() -> dict[str, str]:
    """The pages by their names below docs/."""
    found = {page_of(RULES, rule.id): "\n".join(rule_page(rule)) for rule in rules.find_rules()}
    for signature in find_signatures().values():
        if signature.kind != HARMLESS:
            found[page_of(SIGNATURES, signature.id)] = "\n".join(signature_page(signature))
    return found


def page_of(index: str, name: str) -> str:
    """The name of an entry's page below docs/."""
    return f"{index.removesuffix('.md')}/{name.lower()}.md"


def rule_page(rule: rules.Rule) -> Iterator[str]:
    """A rule: what it does, why, an example, what to use instead, how safe the fix is, the source."""
    found = [
        (given, finding)
        for given in rule.bad[:EXAMPLES]
        for finding in rules.run(*rules.example(given))
        if finding.rule == rule.id
    ]
    yield from (f"# {rule.id}: {rule.about}", "", "## What it does", "")
    what = {"error": "An error", "warning": "A warning", "note": "A note, shown with `--level note`"}[
        rule.severity
    ]
    yield from (f"{what}. {EFFECTS[rule.effect] if rule.effect else ''}".rstrip(), "")
    yield from ("## Why", "", inspect.cleandoc(rule.source), "", "## Example", "")
    for given, finding in found:
        yield from block(given)
        yield from (f"`{'$.' * bool(finding.path)}{finding.path or '$'}`: {finding.message}", "")
    yield from ("## Use instead", "")
    yield from dict.fromkeys(f"- {finding.suggestion}" for _, finding in found if finding.suggestion)
    yield ""
    for given in rule.good[:EXAMPLES]:
        yield from block(given)
    safe = {finding.fix.safe if finding.fix else None for _, finding in found}
    yield from (
        "## How safe the fix is",
        "",
        *(SAFETY[each] for each in (True, False, None) if each in safe),
        "",
    )
    yield "Keys of an example that begin with an underscore say what it is judged for."


def block(given: Any) -> Iterator[str]:
    """An example's config as it would stand in a file."""
    text = json.dumps(given, indent=2, ensure_ascii=False) if isinstance(given, Mapping) else str(given)
    yield from ("```json", text, "```", "")


def signature_page(one: FailureSignature) -> Iterator[str]:
    """A signature: what it means, how it looks, what to do, how sure it is, the source."""
    yield from (f"# {one.id}", "", one.means, "", "## How it looks", "")
    for example in one.examples[:EXAMPLES]:
        yield from ("```text", example.strip("\n"), "```", "")
    yield from ("## What to do", "", one.next, "")
    if one.check:
        yield from ("Make sure with:", "", "```sh", one.check, "```", "")
    if one.causes:
        yield from ("It may be:", "", *(f"- {cause}" for cause in one.causes), "")
    if one.tell_apart:
        yield from ("To tell these apart:", "", one.tell_apart, "")
    again = (
        "The same job, started again, may go well."
        if one.retry
        else "The same job, started again, ends so again."
    )
    yield from (
        "## How sure it is",
        "",
        f"A {one.kind}, of the class `{one.cause}`, {one.confidence}. {again}",
        "",
    )
    if one.versions_in_words:
        yield from ("Versions:", "", one.versions_in_words, "")
    yield from ("## Source", "", one.source)
