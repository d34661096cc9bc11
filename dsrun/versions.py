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
"""NAME==VERSION. Both are compiled where they are needed (re keeps them): most imports only compare two versions."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Facts about a job; None is unknown. A combination's [if] asks for some of them."""

    stage: int | None = None
    """ZeRO's stage."""
    precision: str | None = None
    """fp32, fp16 or bf16."""
    loop: str | None = None
    """The training loop: dsrun, hf, accelerate, lightning, or deepspeed for one of the script's own."""
    accumulates: bool | None = None
    """Whether an optimizer step has several micro-steps."""
    several_ranks: bool | None = None
    gpus: bool | None = None
    """Whether the machine has GPUs."""
    overlap_comm: bool | None = None
    expert_parallel: bool | None = None
    """Whether DeepSpeed's AutoEP divides a mixture's experts."""
    peft: bool | None = None
    """Whether it trains with LoRA or another method that freezes the model."""
    fp32_adapter: bool | None = None
    """Whether the adapter's weights are fp32 beside a model in 16 bits."""
    modules_to_save: bool | None = None
    """Whether LoRA trains whole layers, too (the embedding, the output)."""
    quantized: bool | None = None
    """Whether weights have 4 or 8 bits."""
    checkpointing: bool | None = None
    """Whether activations are recomputed."""
    reentrant: bool | None = None
    """Whether that is done with torch.utils.checkpoint's use_reentrant."""
    reuses_modules: bool | None = None
    """Whether a step runs a submodule more than once."""
    resumes: bool | None = None
    """Whether a checkpoint is loaded."""
    python_writer: bool | None = None
    """Whether the config names a writer of checkpoints."""
    zero_warmup: bool | None = None
    """Whether the config's scheduler has a warm-up of 0 steps."""
    remote_code: bool | None = None
    """Whether the checkpoint's own Python files are used."""
    own_loss: bool | None = None
    """Whether the Trainer's compute_loss is overridden."""
    own_zero_init: bool | None = None
    """Whether the script calls deepspeed.zero.Init itself."""


@dataclass(frozen=True)
class Combination:
    """Versions that are known not to go together."""

    name: str
    file: str
    packages: Mapping[str, str]
    """Package -> versions, as pip writes them: ">=0.17.6,<0.18.3". All of the packages have to be there."""
    conditions: Mapping[str, Any]
    """Field of Circumstances -> its value, or a list of values."""
    severity: str
    when: str
    """The conditions in words, those among them that can't be looked up."""
    happens: str
    do: str
    sources: tuple[str, ...]
    basis: str
    """The worth of the sources: tried, read in released code, said in a thread, reported."""
    rule: str = ""
    """The rule of `dsrun validate` that says the same of a config."""

    @property
    def in_words(self) -> str:
        """Its packages with their versions."""
        return ", ".join(f"{name} {wanted}" for name, wanted in self.packages.items())

    @property
    def cured_by_versions(self) -> bool:
        """Whether other versions are a way out. A combination that began with a release and hasn't ended has none."""
        return any(re.search(r"<|==[\d.]+(?!\.\*)$", wanted) for wanted in self.packages.values())


@dataclass(frozen=True)
class VersionMatch:
    """A combination that some versions meet."""

    combination: Combination
    versions: Mapping[str, str]
    """The versions of its packages."""
    certain: bool
    """Whether the job is known to meet its conditions."""

    @property
    def severity(self) -> str:
        """The combination's severity; an error that may not concern the job is a warning."""
        severity = self.combination.severity
        return WARNING if severity == ERROR and not self.certain else severity

    def __str__(self) -> str:
        named = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        when = f" ({self.combination.when})" if self.combination.when else ""
        return f"{named}: {self.combination.happens}{when}"


def version(text: str) -> tuple[int, ...]:
    """The numbers a version begins with: "2.13.0+cpu" -> (2, 13, 0). A release candidate counts as its release."""
    numbers = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def meets(text: str, wanted: str) -> bool:
    """Whether a version is one of those that pip's specifiers name: meets("0.18.1", ">=0.17.6,<0.18.3")."""
    return all(_meets(version(text), *specifier) for specifier in re.findall(SPECIFIER, wanted))


def _meets(have: tuple[int, ...], sign: str, number: str, star: str) -> bool:
    edge = version(number)
    size = len(edge) if star else max(len(have), len(edge))
    ours, theirs = (numbers + (0,) * (size - len(numbers)) for numbers in (have[:size], edge))
    return {
        ">=": ours >= theirs, "<=": ours <= theirs, "==": ours == theirs, "!=": ours != theirs, "<": ours < theirs,
        ">": ours > theirs,
    }[sign]  # fmt: skip


def judge(versions: Mapping[str, str], circumstances: Circumstances | None = None) -> list[VersionMatch]:
    """The combinations that these versions meet, the worst first, without those that the circumstances rule out.

    versions: name (see NAMES) -> version. A combination with a package that isn't there is not met.
    """
    job = circumstances or Circumstances()
    matches = []
    for combination in combinations().values():
        held = [_holds(getattr(job, field), wanted) for field, wanted in combination.conditions.items()]
        if False in held or not all(
            versions.get(name) and meets(versions[name], wanted)
            for name, wanted in combination.packages.items()
        ):
            continue
        named = {name: versions[name] for name in combination.packages}
        matches.append(VersionMatch(combination, named, None not in held))
    order = tuple(SEVERITIES)
    return sorted(matches, key=lambda match: (order.index(match.severity), not match.certain))


def _holds(have: Any, wanted: Any) -> bool | None:
    """Whether a condition holds; None where it isn't known."""
    if have is None:
        return None
    return have in wanted if isinstance(wanted, list) else bool(have == wanted)


def installed(path: Iterable[str] | None = None) -> dict[str, str]:
    """The versions of PACKAGES that this Python can import, and the kernel's. path: sys.path unless given."""
    every = packages.installed(path)
    return {**{name: every[name] for name in PACKAGES if name in every}, LINUX: os.uname().release}


def given(texts: Sequence[str], option: str) -> dict[str, str]:
    """The versions of "deepspeed==0.19.4,transformers==5.1". Raises DsrunError with all that is wrong in it."""
    from dsrun.releases.packed import packages as with_data

    known = (*NAMES, *(name for name in with_data() if name not in NAMES))
    problems: list[Problem] = []
    versions: dict[str, str] = {}
    for text in (part for line in texts for part in line.split(",") if part.strip()):
        parts = re.fullmatch(GIVEN, text)
        if parts is None:
            hint = "Write NAME==VERSION: deepspeed==0.19.4,transformers==5.1"
            problems.append(Problem(f"{text.strip()!r} names no version", option, hint))
        elif (name := packages.plain(parts[1])) not in known:
            hint = catalog.suggestion(name, known, f"Those that are judged: {', '.join(known)}")
            problems.append(Problem(f"nothing is known of {parts[1]}", option, hint))
        elif versions.setdefault(name, parts[2]) != parts[2]:
            problems.append(Problem(f"{name} is given twice: {versions[name]} and {parts[2]}", option))
    raise_all(problems)
    return versions


def combinations() -> dict[str, Combination]:
    """Every combination by its name. Raises DsrunError with all that is wrong in their files."""
    return _read(tuple(catalog.files(KIND).values()))


@cache
def _read(files: tuple[Path, ...]) -> dict[str, Combination]:
    problems: list[Problem] = []
    known: dict[str, Combination] = {}
    for path in files:
        for name, table in catalog.read_toml(path).items():
            wrong = [Problem(f"{name}: {what}", str(path), hint) for what, hint in _wrong(table)]
            if name in known:
                wrong.append(
                    Problem(f"{name} is in {known[name].file}, too", str(path), "Give it another name.")
                )
            problems += wrong
            if not wrong:
                known[name] = _combination(name, str(path), table)
    raise_all(problems)
    return known


def _combination(name: str, file: str, table: Mapping[str, Any]) -> Combination:
    packages = {key: table[key] for key in NAMES if key in table}
    fields = {key: table[key] for key in ("severity", *TEXTS)}
    return Combination(
        name, file, packages, table.get("if", {}), when=table.get("when", ""), sources=tuple(table["sources"]),
        rule=table.get("rule", ""), **fields,
    )  # fmt: skip


TEXTS = ("happens", "do", "basis")
KEYS = (*NAMES, "if", "severity", "when", *TEXTS, "sources", "rule")


def _wrong(table: Any) -> Iterator[tuple[str, str]]:
    """The faults of a table, each with what would be right."""
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
