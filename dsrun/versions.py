"""Versions that don't go together: the tables in presets/versions/, and which of them versions and a job meet.

A table is a combination that is known to be bad: the versions it needs, what a job has to be like, what happens, what
to do, and who says so. Nothing here asks a machine or imports a package; `installed` reads the names of folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from dsrun import catalog, packages
from dsrun.errors import Problem, raise_all

KIND = "presets/versions"
PACKAGES = (
    "deepspeed", "torch", "transformers", "accelerate", "peft", "trl", "numpy", "pydantic", "triton", "bitsandbytes",
    "flash-attn", "liger-kernel",
)  # fmt: skip
LINUX = "linux"
"""The kernel's version, beside those of packages."""
NAMES = (*PACKAGES, LINUX)
ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = {
    ERROR: "it stops, or trains on wrong gradients, without a doubt",
    WARNING: "it may stop or train worse, or that is reported and not confirmed",
    NOTE: "a change to know about",
}
SPECIFIER = r"(>=|<=|==|!=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?"
GIVEN = r"\s*([A-Za-z0-9_.-]+?)\s*==?\s*v?(\d+(?:\.\d+)*\S*)\s*"
"""Compiled where they are needed (re keeps them): most who import this compare two versions."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What a job is like; None is unknown. A combination's [if] asks for some of these."""

    stage: int | None = None
    """ZeRO's."""
    precision: str | None = None
    """fp32, fp16 or bf16."""
    loop: str | None = None
    """Whose training loop it is: dsrun, hf, accelerate, lightning, or deepspeed for one of the script's own."""
    accumulates: bool | None = None
    """Several micro-steps in an optimizer step."""
    several_ranks: bool | None = None
    gpus: bool | None = None
    """Whether the machine has GPUs."""
    overlap_comm: bool | None = None
    peft: bool | None = None
    """LoRA or another method that freezes the model."""
    fp32_adapter: bool | None = None
    """The adapter's weights are fp32 beside a model in 16 bits."""
    modules_to_save: bool | None = None
    """LoRA that trains whole layers, too (the embedding, the output)."""
    quantized: bool | None = None
    """Weights of 4 or 8 bits."""
    checkpointing: bool | None = None
    """Of activations."""
    reentrant: bool | None = None
    """That checkpointing's kind: torch.utils.checkpoint's use_reentrant."""
    reuses_modules: bool | None = None
    """A step runs a submodule more than once."""
    resumes: bool | None = None
    """A checkpoint is loaded."""
    python_writer: bool | None = None
    """The config names a writer of checkpoints."""
    zero_warmup: bool | None = None
    """The config's scheduler has a warm-up of 0 steps."""
    remote_code: bool | None = None
    """The checkpoint's own Python files are used."""
    own_loss: bool | None = None
    """The Trainer's compute_loss is overridden."""
    own_zero_init: bool | None = None
    """The script calls deepspeed.zero.Init itself."""


@dataclass(frozen=True)
class Combination:
    """Versions that are known not to go together."""

    name: str
    file: str
    packages: Mapping[str, str]
    """Name -> versions, as pip writes them: ">=0.17.6,<0.18.3". All of them have to be there."""
    conditions: Mapping[str, Any]
    """Field of Circumstances -> its value, or a list of them."""
    severity: str
    when: str
    """The conditions in words, with those that nobody can look up."""
    happens: str
    do: str
    sources: tuple[str, ...]
    basis: str
    """What the sources are worth: tried, read in released code, said in a thread, reported."""
    rule: str = ""
    """The rule of `dsrun validate` that says the same of a config."""

    @property
    def in_words(self) -> str:
        """Its packages."""
        return ", ".join(f"{name} {wanted}" for name, wanted in self.packages.items())

    @property
    def cured_by_versions(self) -> bool:
        """Whether other versions are a way out; of what only began with a release, they are none."""
        return any(re.search(r"<|==[\d.]+(?!\.\*)$", wanted) for wanted in self.packages.values())


@dataclass(frozen=True)
class VersionMatch:
    """A combination that some versions meet."""

    combination: Combination
    versions: Mapping[str, str]
    """Those of its packages."""
    certain: bool
    """Whether the job is known to be as its conditions have it."""

    @property
    def severity(self) -> str:
        """An error that may not concern the job is a warning."""
        severity = self.combination.severity
        return WARNING if severity == ERROR and not self.certain else severity

    def __str__(self) -> str:
        named = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        when = f" ({self.combination.when})" if self.combination.when else ""
        return f"{named}: {self.combination.happens}{when}"


def version(text: str) -> tuple[int, ...]:
    """The numbers a version begins with: "2.13.0+cpu" -> (2, 13, 0). A release candidate counts as its release."""
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def meets(text: str, wanted: str) -> bool:
    """Whether a version is one of those that pip's specifiers name: meets("0.18.1", ">=0.17.6,<0.18.3")."""
    return all(_meets(version(text), *found) for found in re.findall(SPECIFIER, wanted))


def _meets(have: tuple[int, ...], sign: str, number: str, star: str) -> bool:
    edge = version(number)
    size = len(edge) if star else max(len(have), len(edge))
    ours, theirs = (numbers + (0,) * (size - len(numbers)) for numbers in (have[:size], edge))
    return {
        ">=": ours >= theirs, "<=": ours <= theirs, "==": ours == theirs, "!=": ours != theirs, "<": ours < theirs,
        ">": ours > theirs,
    }[sign]  # fmt: skip


def judge(versions: Mapping[str, str], circumstances: Circumstances | None = None) -> list[VersionMatch]:
    """The combinations that these versions meet, the worst first; not those that the circumstances rule out.

    versions: name (see NAMES) -> version; a combination with a package that isn't there is not met.
    """
    job = circumstances or Circumstances()
    found = []
    for combination in combinations().values():
        held = [_holds(getattr(job, field), wanted) for field, wanted in combination.conditions.items()]
        if False in held or not all(
            versions.get(name) and meets(versions[name], wanted)
            for name, wanted in combination.packages.items()
        ):
            continue
        named = {name: versions[name] for name in combination.packages}
        found.append(VersionMatch(combination, named, None not in held))
    order = tuple(SEVERITIES)
    return sorted(found, key=lambda match: (order.index(match.severity), not match.certain))


def _holds(have: Any, wanted: Any) -> bool | None:
    """None where it isn't known."""
    if have is None:
        return None
    return have in wanted if isinstance(wanted, list) else bool(have == wanted)


def installed(path: Iterable[str] | None = None) -> dict[str, str]:
    """The versions of PACKAGES that this Python can import, and the kernel's. path: sys.path unless given."""
    every = packages.installed(path)
    return {**{name: every[name] for name in PACKAGES if name in every}, LINUX: os.uname().release}


def given(texts: Sequence[str], option: str) -> dict[str, str]:
    """The versions of "deepspeed==0.19.4,transformers==5.1". Raises DsrunError with all that is wrong in it."""
    problems: list[Problem] = []
    found: dict[str, str] = {}
    for text in (part for line in texts for part in line.split(",") if part.strip()):
        parts = re.fullmatch(GIVEN, text)
        if parts is None:
            hint = "Write NAME==VERSION: deepspeed==0.19.4,transformers==5.1"
            problems.append(Problem(f"{text.strip()!r} names no version", option, hint))
        elif (name := packages.plain(parts[1])) not in NAMES:
            hint = catalog.suggestion(name, NAMES, f"Those that are judged: {', '.join(NAMES)}")
            problems.append(Problem(f"nothing is known of {parts[1]}", option, hint))
        elif found.setdefault(name, parts[2]) != parts[2]:
            problems.append(Problem(f"{name} is given twice: {found[name]} and {parts[2]}", option))
    raise_all(problems)
    return found


def combinations() -> dict[str, Combination]:
    """Every combination by its name. Raises DsrunError with all that is wrong in their files."""
    return _read(tuple(catalog.files(KIND).values()))


@cache
def _read(files: tuple[Path, ...]) -> dict[str, Combination]:
    problems: list[Problem] = []
    found: dict[str, Combination] = {}
    for path in files:
        for name, table in catalog.read_toml(path).items():
            wrong = [Problem(f"{name}: {what}", str(path), hint) for what, hint in _wrong(table)]
            if name in found:
                wrong.append(
                    Problem(f"{name} is in {found[name].file}, too", str(path), "Give it another name.")
                )
            problems += wrong
            if not wrong:
                found[name] = _combination(name, str(path), table)
    raise_all(problems)
    return found


def _combination(name: str, file: str, table: Mapping[str, Any]) -> Combination:
    return Combination(
        name, file, {key: table[key] for key in NAMES if key in table}, table.get("if", {}), table["severity"],
        table.get("when", ""), table["happens"], table["do"], tuple(table["sources"]), table["basis"],
        table.get("rule", ""),
    )  # fmt: skip


TEXTS = ("happens", "do", "basis")
KEYS = (*NAMES, "if", "severity", "when", *TEXTS, "sources", "rule")


def _wrong(table: Any) -> Iterator[tuple[str, str]]:
    """What is wrong with a table, and what would be right."""
    if not isinstance(table, dict):
        yield "is no table", "Begin it with [a-name]."
        return
    for key in table:
        if key not in KEYS:
            yield f"{key} is not a key", catalog.suggestion(key, KEYS, f"Keys: {', '.join(KEYS)}")
    yield from (
        (f"{key} is missing", "A sentence.")
        for key in TEXTS
        if not (isinstance(table.get(key), str) and table[key])
    )
    if not any(name in table for name in NAMES):
        yield "names no version", 'Write one, as deepspeed = ">=0.17.6,<0.18.3".'
    for name in NAMES:
        if name in table and not _is_specifier(table[name]):
            yield f"{name} is {table[name]!r}", 'Write it as pip does: ">=0.17.6,<0.18.3", "==2.6.*".'
    if table.get("severity") not in SEVERITIES:
        yield f"severity is {table.get('severity')!r}", f"One of {', '.join(SEVERITIES)}."
    if not (isinstance(table.get("sources"), list) and table["sources"]):
        yield "sources is missing", "A list of links."
    known = [field.name for field in fields(Circumstances)]
    for key in table.get("if", {}):
        if key not in known:
            yield f"if.{key} is not known of a job", catalog.suggestion(key, known, ", ".join(known))


def _is_specifier(text: Any) -> bool:
    return isinstance(text, str) and all(re.fullmatch(SPECIFIER, part.strip()) for part in text.split(","))
