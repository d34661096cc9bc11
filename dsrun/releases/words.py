"""What the releases say about a name, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.releases.config_changes import facts, in_words
from dsrun.releases.lookup import NameRecord, look_up, uses

MOST_TEXTS = 3


def explained(path: str, parameter: str = "") -> Iterator[str]:
    """The lines of `dsrun explain PATH`. Raises LookupError where there are no data of the package."""
    record = look_up(path, parameter)
    package = record.package
    asked = f"{path}({parameter}=)" if parameter else path
    if not record.releases:
        yield from _never(record, asked, parameter)
        return
    what = f"parameter of {path}" if parameter else record.kind
    yield f"{asked}: {what}, in {package.name}"
    yield ""
    yield f"Releases:    {in_words(package, record.releases)}"
    if record.from_the_start:
        yield f"             {package.releases[0]} is the oldest that was read: it may be older"
    if record.next:
        yield f"Gone since:  {record.next}"
    if record.taken_by_decorator:
        spans = in_words(package, record.taken_by_decorator)
        yield f"Deprecated:  {spans} take it under its old name"
    if parameter:
        yield from _defaults(record, f"{path.rpartition('.')[2]}.{parameter}")
    if record.next and record.any_keyword:
        yield "             (it takes any keyword, and may pass this one on)"
    if record.defined:
        yield f"Defined in:  {record.defined}"
    if record.instead:
        yield f"Instead:     {record.instead} ({record.because})"
    yield from (f"It says:     {text}" for text in record.messages[:MOST_TEXTS])
    if not parameter:
        for use in uses(path):
            until = "and newer" if use.until_now else f"to {use.last}"
            yield f"Imported by: {use.package} {use.first} {until}"
    if record.next and record.dynamic:
        yield f"Note:        {path.rpartition('.')[0]} answers some names at run time (__getattr__)"
    yield f"Read from:   {package.note}"


def _defaults(record: NameRecord, setting: str) -> Iterator[str]:
    """The defaults of a setting, where the data have those of its class."""
    label = "Left out:    "
    for fact in facts(record.package):
        if fact.kind == "default" and fact.place == setting:
            yield f"{label}{fact.text} in {in_words(record.package, fact.releases)}"
            label = " " * len(label)


def _never(record: NameRecord, asked: str, parameter: str) -> Iterator[str]:
    package = record.package
    if record.unread:
        yield f"{asked}: not known, only the name of what it belongs to was read"
    else:
        own = " of its own" if record.inherited_from else ""
        yield f"{asked}: no release of {package.name} that was read has it{own}"
    yield ""
    if record.near:
        yield f"Did you mean {' or '.join(record.near)}?"
    if record.any_keyword:
        yield "It takes any keyword (**kwargs), and may pass this one on."
    for base in record.inherited_from:
        yield f"It inherits from {base}, which may have it:"
        yield ""
        last = record.path.rpartition(".")[2]
        inner = base if parameter or last == base.rpartition(".")[2] else f"{base}.{last}"
        if look_up(inner, parameter).releases:
            yield from explained(inner, parameter)
            return
    yield f"Read from:   {package.note}"
