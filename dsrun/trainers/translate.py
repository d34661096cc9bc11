"""From a trainer's arguments to a run of dsrun's: every argument becomes an option, or is told of, or refuses the file.

1. A row that settles several arguments together runs once, whether the file has them or not: a trainer's own default
   is part of the job. So is that of a single argument with a counterpart, where dsrun's own default is another.
2. Each argument of the file that is left gets what its row says.
3. What no row knows is told of by name, with the nearest name that the trainer declares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsrun.catalog import closest
from dsrun.errors import DsrunError, Problem
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import Entry, entries
from dsrun.trainers import arguments
from dsrun.trainers.counterparts import (
    ANYWAY,
    DIFFERS,
    LEFT_OUT,
    REFUSED,
    SAME,
    SETTLED,
    UNKNOWN,
    Draft,
    ForeignTrainer,
    ImportedValue,
    Row,
    UnlikeError,
    is_on,
)

USUAL = {"weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
"""What holds here where such an option is not given, for options whose default is another's affair."""
OF_OTHERS = {
    "adamw": ("momentum",), "adamw-8bit": ("momentum",), "lion": ("momentum", "adam_epsilon"), "muon": (),
    "sgd": ("adam_beta1", "adam_beta2", "adam_epsilon"),
}  # fmt: skip
"""An optimizer -> the arguments of others, which trainers have for whichever it is."""


def translate(draft: Draft) -> Draft:
    """Fill the draft. Raises DsrunError, with every argument that refuses it, where the job isn't one of dsrun's."""
    trainer = draft.trainer
    _model(draft)
    for row in trainer.rows:
        if row.settle is not None:
            row.settle(draft)
        elif row.kind == SAME:
            _same(draft, row)
    for key in draft.given:
        if key not in draft.outcomes:
            _told(draft, key, trainer.row(key))
    _check_values(draft)
    _of_the_optimizer(draft)
    _one_of_each(draft)
    if refusals := [
        Problem(outcome.text, _place(draft, outcome.line, key))
        for key, outcome in draft.outcomes.items()
        if outcome.kind == REFUSED
    ]:
        raise DsrunError(refusals)
    return draft


def _place(draft: Draft, line: int, key: str) -> str:
    """An argument's place in messages: FILE:LINE: key."""
    where = f"{draft.where}:{line}" if line else draft.where
    return f"{where}: {key}" if where else key


def _model(draft: Draft) -> None:
    key = draft.trainer.model
    name = draft.given.get(key) if key else None
    if not isinstance(name, str) or not name:
        return
    path = draft.find(name) if name.startswith((".", "/", "~")) else None
    draft.model = str(path.absolute()) if path else name
    draft.tell(key, SAME, "model")


def _same(draft: Draft, row: Row) -> None:
    """Each argument of the row that the file has; else the trainer's default of the first, where it isn't dsrun's."""
    (option,) = row.options
    named = [key for key in draft.given if row.has(key)]
    for key in named:
        value = draft.given[key]
        if value is None and row.empty is None:
            draft.tell(key, ANYWAY, "is empty: the default holds")
            continue
        if value is None:
            draft.put(option, row.empty, key, source=f"{key} is empty")
            continue
        try:
            new = row.translate(value) if row.translate else value
        except UnlikeError as error:
            draft.tell(key, DIFFERS, f"{value}: {error}")
            continue
        draft.put(option, new, key, text=row.text if new is not None and option in draft.options else "")
    if row.only_given:
        return
    if all(draft.given.get(key) is None for key in named) and option not in draft.options:
        _default(draft, row, option)


def _default(draft: Draft, row: Row, option: str) -> None:
    entry = entries(FinetuneOptions)[option]
    for key in row.keys:
        value = draft.trainer.default(key)
        if value is None:
            continue
        try:
            new = row.translate(value) if row.translate else value
        except UnlikeError:
            continue
        plain = not entry.option.default_text and entry.default is not None
        ours = entry.default if plain else USUAL.get(option)
        if new is not None and new != ours:
            draft.options[option] = ImportedValue(new, f"{draft.trainer.title}'s own default of {key}")
        return
    if row.empty is not None:
        draft.options[option] = ImportedValue(row.empty, f"{row.keys[0]}: {row.text or 'is not given'}")


def _told(draft: Draft, key: str, row: Row | None) -> None:
    """Note what becomes of an argument that is no option."""
    value = draft.given[key]
    if row is None:
        known = arguments.declared(draft.trainer.name)
        if key in known:
            text = "dsrun's table has no entry for it yet"
            kind = LEFT_OUT if not is_on(value) or value == known[key] else UNKNOWN
            draft.tell(key, kind, "is off" if kind == LEFT_OUT else text)
            return
        near = closest(key, known, 0.8)
        says = f"{draft.trainer.title} {arguments.version(draft.trainer.name)} has no such argument"
        draft.tell(key, UNKNOWN, f"{says}: did you mean {near}?" if near else says)
    elif row.kind in (DIFFERS, REFUSED) and (not is_on(value) or value == draft.trainer.default(key)):
        draft.tell(key, ANYWAY, "asks for nothing")
    elif row.kind == SAME:
        draft.tell(key, ANYWAY, "as dsrun has it")
    elif row.kind == SETTLED:  # its function has had no use for it
        on = is_on(value) and value != draft.trainer.default(key)
        draft.tell(key, UNKNOWN if on else ANYWAY, "means nothing beside the others" if on else "is off")
    else:
        draft.tell(key, row.kind, row.text)


def _check_values(draft: Draft) -> None:
    """Values that dsrun's option doesn't take are told of, and not written: the run file would be refused."""
    known = entries(FinetuneOptions)
    for option, setting in [*draft.options.items()]:
        entry = known[option]
        setting.value = _number(entry, setting.value)
        if wrong := entry.problem(setting.value):
            del draft.options[option]
            for outcome in draft.outcomes.values():
                if outcome.kind == SAME and option in outcome.text.split(", "):
                    outcome.kind, outcome.text = DIFFERS, f"{entry.flag} can't be {setting.value}. {wrong}"


def _of_the_optimizer(draft: Draft) -> None:
    chosen = draft.options.get("optimizer")
    name = chosen.value if chosen else "adamw"
    for option in OF_OTHERS.get(name, ()):
        if draft.options.pop(option, None):
            for outcome in draft.outcomes.values():
                if outcome.kind == SAME and outcome.text == option:
                    outcome.kind, outcome.text = ANYWAY, f"{name} has no such argument"


def _number(entry: Entry, value: Any) -> Any:
    """A number that is written as a text (YAML reads 1e-4 as one), and a whole one that is written 3.0."""
    if entry.kind in (int, float) and isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    if entry.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _one_of_each(draft: Draft) -> None:
    """Drops the weaker of two options that say the same thing in two ways: max_steps win over epochs, and warm-up
    steps over a share, as the trainers have it."""
    for wins, loses in (("max_steps", "epochs"), ("warmup_steps", "warmup_ratio")):
        if wins in draft.options and loses in draft.options:
            del draft.options[loses]
            for outcome in draft.outcomes.values():
                if outcome.kind == SAME and outcome.text == loses:
                    outcome.kind, outcome.text = ANYWAY, f"{wins} decides"


def plain(trainer: ForeignTrainer, values: Mapping[str, Any]) -> dict[str, Any]:
    """A file's arguments as the trainer's table knows them."""
    return trainer.prepare(dict(values))
