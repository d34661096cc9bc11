"""Names, members and parameters that installed packages really have, and what the data say of them.

A name is drawn from the syntax of an installed file or from the data, and then looked for in the imported module: only
what import and data both speak of is compared. `python tests/releases/drawn_names.py 500 SEED` prints what differs.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from dsrun.releases import lookup, packed

PACKAGES = ("transformers", "accelerate", "peft", "datasets", "deepspeed", "tokenizers", "torch")


class Triple(NamedTuple):
    """A name of a package in the installed release."""

    package: str
    release: str
    path: str
    parameter: str = ""


class Answer(NamedTuple):
    triple: Triple
    real: bool
    """Whether the installed package has it."""
    told: bool | None
    """Whether the data say so."""


def installed(package: str) -> str:
    """The installed release, if the data have it; else an empty text."""
    try:
        release = importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""
    return release if release in packed.package(package).releases else ""


def modules(package: str) -> list[packed.PackedEntry]:
    """The modules that the data know, that are now or were once."""
    return [module for module in packed.package(package).modules() if "__main__" not in module.text]


def drawn(package: str, count: int, seed: int) -> Iterator[Triple]:
    """Names, members and parameters of any release, evenly from modules: some are in the installed one."""
    chance = random.Random(f"{package} {seed}")
    release = installed(package)
    known = modules(package)
    while count:
        module = chance.choice(known)
        if not (entries := list(module.of(""))):
            continue
        entry = chance.choice(entries)
        path, parameter = f"{module.text}.{entry.text}", ""
        members = list(entry.of("."))
        kind = chance.random()
        if kind < 0.4 and members:
            member = chance.choice(members)
            if member.kind == "s":  # only an instance has it
                continue
            path = f"{path}.{member.text}"
            lines = list(member.of(")"))
        else:
            lines = list(entry.of("("))
        if kind < 0.7 and lines:
            parameter = chance.choice(chance.choice(lines).text.split(","))
            if parameter.startswith("*"):
                continue
        count -= 1
        yield Triple(package, release, path, parameter)


def real(triple: Triple) -> bool | None:
    """Whether the installed package has it; None where its module can't be imported here."""
    parts = triple.path.split(".")
    found: object = None
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            return None
        except BaseException:
            return None
        break
    for part in parts[length:]:
        try:
            found = getattr(found, part)
        except AttributeError:
            if inspect.ismodule(found) and is_conditional(found, part):
                return None
            if not has_field(found, part):
                return False
            return None if triple.parameter else True
        except BaseException:
            return None
    if inspect.ismodule(
        found
    ):  # as `import torch.nn.functional as F` names it: such names are not in the data
        return None
    return takes(found, parts[-1], triple.parameter) if triple.parameter else True


def is_conditional(module: ModuleType, name: str) -> bool:
    """Whether a module defines a name in a branch alone, as for a package that may not be installed."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return False
    inner = [
        each
        for statement in tree.body
        if isinstance(statement, (ast.If, ast.Try))
        for each in ast.walk(statement)
    ]
    return any(name in (getattr(each, "name", ""), getattr(each, "id", "")) for each in inner)


def has_field(found: object, name: str) -> bool:
    """Whether a class has an annotated field without a value of its own."""
    return any(name in vars(base).get("__annotations__", {}) for base in getattr(found, "__mro__", ()))


def takes(found: object, name: str, parameter: str) -> bool | None:
    """Whether a function takes a parameter by name; None where its signature is that of a wrapper."""
    if dataclasses.is_dataclass(found):
        return parameter in inspect.signature(found).parameters  # type: ignore[arg-type]
    try:
        known = inspect.signature(found, follow_wrapped=True).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    if parameter in known:
        return (
            True if hasattr(found, "__code__") or inspect.isclass(found) else None
        )  # compiled: stubs may differ
    if (
        getattr(found, "__name__", name) != name
    ):  # what a decorator made of it, as triton's where there is no GPU
        return None
    kinds = {one.kind for one in known.values()}
    return None if inspect.Parameter.VAR_KEYWORD in kinds else False


def compared(package: str, count: int, seed: int) -> Iterator[Answer]:
    """What the data say beside what is there, for names that both speak of."""
    for triple in drawn(package, 20 * count, seed):
        if (there := real(triple)) is None:
            continue
        record = lookup.look_up(triple.path, triple.parameter)
        yield Answer(triple, there, record.is_in(triple.release))
        count -= 1
        if not count:
            return


def main(count: int, seed: int) -> int:
    there = [package for package in PACKAGES if package in packed.packages() and installed(package)]
    answers = [answer for package in there for answer in compared(package, -(-count // len(there)), seed)]
    wrong = [answer for answer in answers if answer.real != answer.told]
    for answer in wrong:
        print(answer)
    real_ones = Counter(answer.triple.package for answer in answers if answer.real)
    print(f"{len(answers)} drawn, {len(wrong)} wrong; {sum(real_ones.values())} are there: {dict(real_ones)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
