"""Make deepspeed.json, the JSON Schemas of DeepSpeed's configuration file, from DeepSpeed's source code.

    python -m tools.schemas.generate                               read the installed DeepSpeed
    python -m tools.schemas.generate deepspeed-0.18.9.tar.gz ...   read source packages
    python -m tools.schemas.generate --fetched                     read all releases that tools.releases has fetched
    python -m tools.schemas.generate --check                       exit 1 with a diff if it isn't current

Each release read takes its place in the file, new or again; the others stay as they are in it. What a release
knows is read from its code (source.py): the fields of pydantic models, and the keys that its parser asks for.
overlay.json, written by hand, adds order, descriptions and everything the code doesn't
state. A key that a release reads and the overlay doesn't describe stops the generation, and so does a key
that no version reads, or that the newest has dropped without advice in the overlay's `removed`.

Both files are one tree for all releases. Where they differ, an object holds the variants of an entry, under
the span of releases (both ends included): {"until 0.19.2": 0, "since 0.19.3": 1.0}. "until 0.18" means its
last patch. What the overlay has of one minor version counts for a neighbour, too: a key that goes within 0.19
stands there as one of 0.18.

In the overlay, JSON Schema keywords are taken over as they are (a type given there wins over the one in the
code); these are instructions instead:

model, signatures, types_from
    "module:Class" that an object's keys come from: a pydantic model, constructors' arguments (a list), or a
    dataclass with the types of keys that are read one by one.
enum_from, known_from
    "module:name" of a collection: the only values there are, or those worth suggesting.
any_case
    The values may also be written in lower or upper case.
auto
    HF Trainer fills this key in when it is "auto": true from its arguments, "accelerate" through accelerate's
    own defaults, which know nothing of the arguments.
alias_of
    A second name of another key of the same object.
read_by
    Who reads a key that the parser doesn't; without it such a key is left out.
needs_by
    The rule that says in its own words what a section needs once it is on: no x-needs.
taken_until
    The last release that accepts a key although nothing in it reads the key.

In the schema these say what JSON Schema has no words for:

x-checked
    DeepSpeed rejects unknown keys of this object; in all others it ignores them silently.
x-own
    Keywords that the overlay adds to what a pydantic model enforces.
x-wrong
    What happens with a value of another type where no model looks: "refused", "fails" or "differs".
x-refuses
    The kinds of values (schema.KINDS_OF_VALUES) that the release stops at, by following its reader (interpret.py).
x-needs
    Keys that a section has to have once it is enabled, found in the same way.
x-drops-auto
    A section that a model around it takes, which drops it where it is "auto" and does not stop.
x-empty
    DeepSpeed takes an empty list or text for the section, as one without keys.
x-converts
    "pydantic 1" where a release's models convert values as that does; else they do as pydantic 2.
x-any-case
    DeepSpeed takes the text in any mixture of cases.
x-removed, x-renamed, x-refused
    What to do instead of a key that is gone; its new name; which of them stop DeepSpeed whatever their value.
x-added-later
    Keys that a later version brought, and which.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from dsrun.config import tree
from dsrun.config.schemas import schema
from dsrun.config.schemas.schema import PYDANTIC_1, Node, Version
from dsrun.errors import DsrunError, Problem
from dsrun.files import write_atomic
from tools.schemas.interpret import Answers, answers
from tools.schemas.source import NO_DEFAULT, PACKAGE, Known, Read, ReleaseSource, TypedClass, nullable

PACKAGED = Path(schema.__file__).parent
"""Files that the package holds."""
SCHEMAS = PACKAGED / "deepspeed.json"
OVERLAY = Path(__file__).with_name("overlay.json")

COMMENTS: Node = {"^(_|//|#|x-|[Cc]omments?$)": {}}
"""Keys that people write comments under, wherever DeepSpeed ignores what it doesn't know."""

INSTRUCTIONS = frozenset(
    (
        "model",
        "signatures",
        "types_from",
        "enum_from",
        "known_from",
        "any_case",
        "auto",
        "alias_of",
        "read_by",
        "taken_until",
        "needs_by",
    )
)
OWN = (
    "type",
    "const",
    "enum",
    "anyOf",
    "items",
    "minimum",
    "exclusiveMinimum",
    "maximum",
    "exclusiveMaximum",
)
"""Keywords that say which values a key takes."""

FIRST = (
    "description",
    "deprecated",
    "x-deprecated-types",
    "x-alias-of",
    "x-no-effect",
    "x-auto",
    "x-checked",
    "type",
)
LAST = ("default", "additionalProperties", "patternProperties", "required", "properties")
BELOW = (("items", "[]"), ("additionalProperties", ".*"))

NOT_SETTINGS = frozenset(("self", "params", "model_params", "optimizer", "adamw_mode", "max_grad_norm"))
"""Arguments of constructors that the engine passes itself, or refuses."""


@dataclass(frozen=True)
class Block:
    """Place where a block is read key by key."""

    file: str
    names: tuple[str, ...] = ()
    """Names of the block there; none mean any name."""
    whole: bool = True
    """No other block has these names, so every key that is asked of them has to be in the overlay."""
    keys: tuple[str, ...] = ()
    """Only these are asked of this block, anything else of other blocks under the same name."""

    def asks(self, read: Read) -> bool:
        named = not self.names or read.block in self.names
        return named and (not self.keys or read.key in self.keys)


CONFIG = "runtime/config.py"
DATA = "runtime/data_pipeline/config.py"
TOP = ("param_dict", "self._param_dict", "ds_config")
BLOCKS: dict[str, tuple[Block, ...]] = {
    "": (
        Block(CONFIG, TOP),
        Block("runtime/zero/config.py", TOP),
        Block("runtime/activation_checkpointing/config.py", TOP),
        Block("runtime/swap_tensor/aio_config.py", TOP),
        Block("runtime/precision_config.py", TOP),
        Block("runtime/tensor_parallel/config.py", TOP),
        Block("runtime/compiler.py", TOP),
        Block("comm/config.py", TOP),
        Block("monitor/config.py", TOP),
        Block("profiling/config.py", TOP),
        Block("nebula/config.py", TOP),
        Block("utils/config.py", TOP),
        Block("datastates/config.py", TOP),
        Block("autotuning/config.py", TOP, keys=("autotuning",)),
        Block("compression/config.py", TOP, keys=("compression_training",)),
        Block(DATA, TOP, keys=("data_efficiency", "curriculum_learning")),
    ),
    "optimizer": (Block(CONFIG, ("param_dict[OPTIMIZER]",)),),
    "scheduler": (Block(CONFIG, ("param_dict[SCHEDULER]",)),),
    "bf16": (Block(CONFIG, ("param_dict[key]",)),),
    "fp16": (Block(CONFIG, ("param_dict[FP16]", "fp16_dict")),),
    "torch_autocast": (Block(CONFIG, ("param_dict[TORCH_AUTOCAST]",)),),
    "data_types": (Block(CONFIG, ("data_types_params",)),),
    "aio": (Block("runtime/swap_tensor/aio_config.py", ("aio_dict",)),),
    "activation_checkpointing": (
        Block("runtime/activation_checkpointing/config.py", ("act_chkpt_config_dict",)),
    ),
    "tensor_parallel.partition_config": (Block("module_inject/autotp_config.py", ("config_dict",)),),
    "tensor_parallel.partition_config.layer_specs[]": (
        Block("module_inject/autotp_config.py", ("spec_dict",)),
    ),
    "expert_parallel": (Block("module_inject/auto_ep_config.py", ("param_dict",)),),
    "checkpoint": (
        Block(CONFIG, ("checkpoint_params",)),
        Block("runtime/model_checkpointing/config.py", ("checkpoint_dict",)),
        Block("runtime/model_checkpointing/config.py", ("param_dict",), keys=("writer",)),
    ),
    "checkpoint.parallel_write": (Block(CONFIG, ("par_write_params",)),),
    "checkpoint.writer": (Block("runtime/model_checkpointing/config.py", ("writer_dict",)),),
    "data_efficiency": (Block(DATA, whole=False),),
    "timers": (Block("utils/config.py", ("param_dict[TIMERS]",)),),
    "flops_profiler": (Block("profiling/config.py", ("flops_profiler_dict",)),),
    "autotuning": (
        Block("autotuning/config.py", ("autotuning_dict",)),
        Block("autotuning/config.py", ("param_dict",), keys=("model_info",)),
    ),
    "autotuning.model_info": (Block("autotuning/config.py", ("param_dict[MODEL_INFO]",)),),
    "amp": (Block(CONFIG, ("param_dict[AMP]",)),),
    "curriculum_learning": (Block(DATA, ("param_dict[CURRICULUM_LEARNING_LEGACY]",)),),
    "elasticity": (Block("elasticity/config.py", ("param_dict",)), Block(CONFIG, ("elastic_dict",))),
    "nebula": (Block("nebula/config.py", ("nebula_dict",)),),
    "progressive_layer_drop": (Block(CONFIG, ("param_dict[PROGRESSIVE_LAYER_DROP]",)),),
    "sparse_attention": (Block(CONFIG, ("sparsity",)), Block(CONFIG, ("param_dict",), keys=("mode",))),
}
ELSEWHERE = frozenset(("mode", "attention", "eigenvalue"))
"""Asked of a section that a function calls param_dict too."""

REFUSED = (("_REMOVED_TOP_LEVEL_CONFIG_KEYS", ""), ("_REMOVED_ZERO_CONFIG_KEYS", "zero_optimization"))
"""The tables in CONFIG of keys that stop DeepSpeed whatever their value, and the section of each."""

PATCHES = 999
"""A number that no patch has: of the newest patch of a minor version."""

COPIED = frozenset(("optimizer.params", "scheduler.params", "inference", "msamp"))
"""Read by others than DeepSpeed, or by what the code builds from them: in every version as in the newest."""

FORMER = {"deepspeed.compile.config:CompileConfig": "deepspeed.runtime.compiler:CompileConfig"}
"""Place of a model of the newest version in older ones, in another shape."""


def with_neighbours(overlay: Node, release: Version) -> Node:
    """The overlay for one release: what went or came within its minor version stands in the one before or after."""
    own: Node = schema.as_of(overlay, release)
    major, minor = release[:2]
    for other in ((major, minor - 1, PATCHES), (major, minor + 1, 0)):
        _fill(own, schema.as_of(overlay, other))
    return own


def _fill(own: Node, other: Node) -> None:
    for key, entry in other.items():
        if key not in own:
            if isinstance(entry, dict):
                own[key] = entry
        elif isinstance(entry, dict) and isinstance(own[key], dict):
            _fill(own[key], entry)


class Builder:
    """Joins the overlay with what a release's code says; collects every disagreement in `problems`.

    newest: the newest version's schema, {} for the newest itself.
    """

    def __init__(self, source: ReleaseSource, overlay: Node, newest: Node) -> None:
        self.source = source
        self.overlay = with_neighbours(overlay, source.version)
        self.newest = dict(nodes(newest))
        self.refused = [
            join(section, name)
            for table, section in REFUSED
            if table in source.defined(CONFIG)
            for name in source.evaluate(CONFIG, source.defined(CONFIG)[table])
        ]
        self.problems: list[Problem] = []

    def schema(self) -> Node:
        """The schema without the lists that need the other versions. Raises DsrunError with all that doesn't fit."""
        self.problems += [
            Problem("removed by DeepSpeed, but not in the overlay's list", path)
            for path in self.refused
            if path not in self.overlay["removed"]
        ]
        properties = self.properties(self.overlay, None, "")
        mark_refused({"properties": properties}, self.source, self.overlay)
        if self.problems:
            raise DsrunError(
                Problem(problem.what, f"{self.source.release}: {problem.where}") for problem in self.problems
            )
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://dsrun.invalid/schemas/deepspeed-{version}.schema.json",
            "title": "DeepSpeed {version} configuration",
            "description": self.overlay["description"],
            "x-deepspeed-version": "{release}",
            "type": "object",
            "additionalProperties": False,
            "patternProperties": COMMENTS,
            "properties": {
                **properties,
                "$schema": {"description": "Where an editor finds this schema.", "type": "string"},
            },
            **({"x-refused": self.refused} if self.refused else {}),
            **({"x-converts": PYDANTIC_1} if self.source.converts_as_1 else {}),
        }

    def known_keys(self, entry: Node, model: TypedClass | None, path: str) -> dict[str, Known]:
        """Facts in DeepSpeed's code about the keys of the object at `path`."""
        if model is not None:
            return self.source.fields(model)
        if "signatures" in entry:
            return self.arguments(entry["signatures"])
        if path == "pipeline":
            found = self.source.local(CONFIG, "get_pipeline_config", "default_pipeline")
            return {name: Known(default=default) for name, default in found.items()}
        types = self.source.fields(TypedClass(*place(entry["types_from"]))) if "types_from" in entry else {}
        known: dict[str, Known] = {}
        for block in blocks(path):
            for read in self.source.reads(block.file):
                child = entry["properties"].get(read.key)
                expected = "read_by" not in child if child else block.whole and read.key not in ELSEWHERE
                if expected and block.asks(read) and join(path, read.key) not in self.refused:
                    typed = types.get(read.key, Known())
                    found = known.setdefault(read.key, Known(typed.keywords))
                    if found.default is NO_DEFAULT:
                        found.default = read.default
        return known

    def arguments(self, targets: Sequence[str]) -> dict[str, Known]:
        """The settings of some constructors; where defaults differ, the first one counts."""
        found: dict[str, Known] = {}
        for target in targets:
            for name, default in self.source.arguments(*place(target)).items():
                known = found.setdefault(name, Known())
                if known.default is NO_DEFAULT:
                    known.default = default
        return {name: known for name, known in found.items() if name not in NOT_SETTINGS}

    def properties(self, entry: Node, model: TypedClass | None, path: str) -> Node:
        """The "properties" of an object: those of the overlay in their order, then second names."""
        known = {
            info.alias or name: (name, info) for name, info in self.known_keys(entry, model, path).items()
        }
        entries = {
            name: child
            for name, child in entry["properties"].items()
            if self.has(child, name, known, join(path, name))
        }
        found: Node = {}
        second = {name: child["alias_of"] for name, child in entries.items() if "alias_of" in child}
        for name, child in entries.items():
            if name not in second:
                _, info = known.get(name, ("", Known()))
                found[name] = self.node(child, info, join(path, name))
                if model is not None:
                    mark_own(found[name], info)
        for name, (bare, _) in known.items():
            if name not in entries:
                self.problems.append(Problem("missing in the overlay", join(path, name)))
            elif bare != name:
                found[bare] = second_name(found[name], name)
        for name, canonical in second.items():
            other = {keyword: value for keyword, value in entries[name].items() if keyword != "alias_of"}
            found[name] = {**second_name(found[canonical], canonical), **other, "deprecated": True}
        return {name: ordered(node) for name, node in found.items()}

    def has(self, entry: Node, name: str, known: Mapping[str, Any], path: str) -> bool:
        """Whether the release accepts a key."""
        if name in known or path in COPIED or entry.get("alias_of") in known:
            return True
        if "taken_until" in entry:
            until = schema.numbers(entry["taken_until"])
            return self.source.version[: len(until)] <= until
        return "read_by" in entry and (not self.newest or self.source.mentions(name))

    def node(self, entry: Node, known: Known, path: str) -> Node:
        """The schema of one key."""
        if path in COPIED and self.newest:
            return copy.deepcopy(self.newest[path])
        if not known.keywords and path in self.newest:  # not a model's field in this version
            same = without_auto(self.newest[path])
            known = replace(known, keywords={"type": same["type"]} if "type" in same else {})
        given = {keyword: value for keyword, value in entry.items() if keyword not in INSTRUCTIONS}
        # These say all there is to say about the value, whatever its Python type is.
        node = given if given.keys() & {"anyOf", "const", "not"} else {**known.keywords, **given}
        if "enum_from" in entry:
            node["enum"] = self.collection(entry["enum_from"])
        if "known_from" in entry:
            node["x-known-values"] = self.collection(entry["known_from"])
        if entry.get("any_case"):
            spelled = [
                spell(value) for spell in (str, str.lower, str.upper) for value in node["enum"] if value
            ]
            node["x-any-case"] = True
            node["enum"] = [*dict.fromkeys(spelled), *([None] if None in node["enum"] else [])]
        if known.default is not NO_DEFAULT:
            node.setdefault("default", known.default)
        if node.get("default", "") is None or ("enum" in node and "null" in node["type"]):
            node = nullable(node)
        self.nest(node, entry, known, path)
        if not node.get("description"):
            self.problems.append(Problem("no description", path))
        if not node.keys() & {"type", "const", "anyOf", "not"}:
            self.problems.append(Problem("no type", path))
        return auto(node, entry["auto"]) if entry.get("auto") else node

    def collection(self, target: str) -> list[Any]:
        """The values of the collection behind "module:name"."""
        found = self.source.value(*self.source.find(*place(target)))
        if found is NO_DEFAULT:
            self.problems.append(Problem("can't be read", target))
            return []
        return [*found]

    def nest(self, node: Node, entry: Node, known: Known, path: str) -> None:
        """Fill in what lies below a node: keys, list items, values under free names."""
        if "properties" in entry:
            target = entry.get("model", "")
            models = [TypedClass(*place(name)) for name in (target, FORMER.get(target, "")) if name]
            model = known.model or next((model for model in models if self.source.has(model)), None)
            if model is not None and self.source.rejects_unknown(model):
                node["x-checked"] = True
            elif not entry.get("additionalProperties"):
                node["patternProperties"] = COMMENTS
            node.setdefault("type", "object")
            node.setdefault("additionalProperties", False)
            node["properties"] = self.properties(entry, model, path)
        for keyword, mark in BELOW:
            below = entry.get(keyword)
            if isinstance(below, dict) and "properties" in below:
                node[keyword] = ordered(self.node(below, Known(), path + mark))


def mark_refused(root: Node, source: ReleaseSource, overlay: Node) -> Answers:
    """Write into the keys which kinds of values the release's reader stops at, and what a section has to have."""
    known = dict(nodes(root))
    told = {path for path, entry in nodes(overlay) if "needs_by" in entry}
    found = answers(source, known)
    for path, kinds in found.refuses.items():
        inner = known[path]["anyOf"][1] if "x-auto" in known[path] else known[path]
        inner["x-refuses"] = kinds
        bound(inner, kinds)
    for path, keys in found.needs.items():
        if path not in told:
            known[path]["x-needs"] = keys
    for path in found.empty:
        known[path]["x-empty"] = True
    return found


def bound(node: Node, kinds: Sequence[str]) -> None:
    """Give a number the bound that the reader holds it to, where none is known."""
    limits = {"minimum", "exclusiveMinimum", "enum", "anyOf"}
    if schema.types(node) & {"integer", "number"} and not node.keys() & limits and "positive" not in kinds:
        if {"zero", "negative"} <= {*kinds}:
            node["exclusiveMinimum"] = 0
        elif "negative" in kinds:
            node["minimum"] = 0


def mark_own(node: Node, known: Known) -> None:
    """List the keywords that the overlay adds to what a pydantic model enforces, as "x-own": past these
    DeepSpeed goes on.
    """
    inner = node["anyOf"][1] if "x-auto" in node else node
    own = [key for key in OWN if key in inner and inner[key] != known.keywords.get(key)]
    if own and not known.model:
        inner["x-own"] = own


def auto(node: Node, who: bool | str) -> Node:
    """The node of a key that is filled in when it is "auto": by HF Trainer (true), or by accelerate below it."""
    outside: Node = {keyword: node.pop(keyword) for keyword in ("description", "default") if keyword in node}
    return {**outside, "x-auto": who, "anyOf": [{"const": "auto"}, ordered(node)]}


def second_name(node: Node, canonical: str) -> Node:
    """The node of another name of a key, under which HF Trainer fills in nothing."""
    description = f"Another name of {canonical}: {node['description']}"
    return {**without_auto(node), "description": description, "x-alias-of": canonical}


def without_auto(node: Node) -> Node:
    found = {keyword: value for keyword, value in node.items() if keyword != "x-auto"}
    if "x-auto" in node:
        found.update(found.pop("anyOf")[1])
    if "properties" in node:
        found["properties"] = {name: without_auto(child) for name, child in node["properties"].items()}
    return ordered(found)


def ordered(node: Node) -> Node:
    """The same node with its keywords in reading order."""
    middle = [keyword for keyword in node if keyword not in FIRST and keyword not in LAST]
    return {keyword: node[keyword] for keyword in (*FIRST, *middle, *LAST) if keyword in node}


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def blocks(path: str) -> tuple[Block, ...]:
    """Places where the block at `path` is read: its own, or those of a block around it."""
    while path not in BLOCKS and "." in path:
        path = path.rpartition(".")[0]
    return BLOCKS.get(path, ())


def place(target: str) -> tuple[str, str]:
    """The file and the name behind "deepspeed.module:name"."""
    module, _, name = target.partition(":")
    return module.removeprefix(f"{PACKAGE}.").replace(".", "/") + ".py", name


def nodes(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every key's dotted path and node, outer ones first; list items are "path[]", free names "path.*"."""
    for name, child in node.get("properties", {}).items():
        yield join(path, name), child
        yield from nodes(child, join(path, name))
    for keyword, mark in BELOW:
        if isinstance(node.get(keyword), dict):
            yield from nodes(node[keyword], path + mark)


# All versions together


def schema_of(source: ReleaseSource, overlay: Node, newest: Node) -> Node:
    """The schema of one release without what needs the others. newest: that of the newest; {} for itself."""
    try:
        return Builder(source, overlay, newest).schema()
    finally:
        source.forget()


def schemas(sources: Sequence[ReleaseSource], overlay: Node) -> dict[Version, Node]:
    """The schema of each release, oldest first: made from the source where there is one, else as it is in the file."""
    found = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    known = map(schema.numbers, found.pop(schema.RELEASES))
    made = {release: schema.as_of(found, release) for release in known}
    ordered_sources = sorted(sources, key=lambda source: source.version, reverse=True)
    for source in ordered_sources[:1]:
        newest = max([source.version, *made])
        made[source.version] = schema_of(source, overlay, {} if newest == source.version else made[newest])
    rest = ordered_sources[1:]
    if rest:
        work = partial(schema_of, overlay=overlay, newest=made[max(made)])
        with multiprocessing.get_context("fork").Pool(min(len(rest), os.cpu_count() or 1)) as pool:
            made |= zip((source.version for source in rest), pool.map(work, rest, chunksize=4), strict=True)
    made = dict(sorted(made.items()))
    ever = {path for node in made.values() for path, _ in nodes(node)}
    if unread := [path for path, _ in nodes(overlay) if path not in ever]:
        raise DsrunError(Problem("not a key that DeepSpeed reads", path) for path in unread)
    add_lists(made, overlay["removed"], overlay["renamed"])
    return made


def add_lists(made: dict[Version, Node], advice: Mapping[str, str], renamed: Mapping[str, str]) -> None:
    """Write x-removed, x-renamed and, but for the newest, x-added-later into the schemas. Oldest first."""
    keys = {release: dict.fromkeys(path for path, _ in nodes(node)) for release, node in made.items()}
    ever = {path for known in keys.values() for path in known}
    problems = []
    earlier: set[str] = set()
    for release, node in made.items():
        gone = topmost(earlier - keys[release].keys())
        earlier |= keys[release].keys()
        problems += [
            Problem("no advice in the overlay's list", f"{schema.name_of(release)}: {path}")
            for path in gone
            if path not in advice
        ]
        later = {path: other for other in reversed(keys) if other > release for path in keys[other]}
        lists = {
            "x-removed": {path: text for path, text in advice.items() if path in gone or path not in ever},
            "x-renamed": {old: new for old, new in renamed.items() if old in gone},
            "x-added-later": {
                path: schema.name_of(later[path])
                for path in sorted(topmost(later.keys() - keys[release].keys()))
            },
        }
        refused = node.pop("x-refused", None)
        node.update({**lists, **({"x-refused": refused} if refused else {})})
    del node["x-added-later"]
    if problems:
        raise DsrunError(problems)


def topmost(paths: set[str]) -> set[str]:
    """The paths that don't lie below another one of them."""
    return {path for path in paths if not any(path.startswith(f"{other}.") for other in paths)}


def merged(entries: Mapping[Version, Any], every: Sequence[Version] = ()) -> Any:
    """One entry for all releases: what schema.as_of takes apart. tree.MISSING where a release hasn't got it.

    every: all releases of the file, where the entries are of some of them.
    """
    releases = [*entries]
    every = every or releases

    def alike(version: Version) -> Any:
        """Objects are merged key by key; anything else is a variant of its own."""
        entry = entries[version]
        return "an object" if isinstance(entry, dict) else id(entry) if entry is tree.MISSING else repr(entry)

    variants: dict[str, Any] = {}
    for _, group in groupby(releases, alike):
        span = [*group]
        entry = entries[span[0]]
        if isinstance(entry, dict):
            order = in_order([[*entries[version]] for version in reversed(span)])
            entry = {
                key: merged({version: entries[version].get(key, tree.MISSING) for version in span}, every)
                for key in order
            }
        since = f"since {edge(span[0], every, 0)}" if span[0] != releases[0] else ""
        until = f"until {edge(span[-1], every, -1)}" if span[-1] != releases[-1] else ""
        if entry is not tree.MISSING:
            variants[f"{since} {until}".strip()] = entry
    return variants.get("", variants)


def edge(release: Version, every: Sequence[Version], end: int) -> str:
    """The name of a release at the edge of a span; its minor version's where it is the first (0) or last (-1) of it."""
    of_minor = [other for other in every if other[:2] == release[:2]]
    return schema.name_of(release[:2] if of_minor[end] == release else release)


def in_order(lists: Sequence[Sequence[str]]) -> list[str]:
    """All keys in one order that keeps that of each list, near the first list's own."""
    after: dict[str, list[str]] = {key: [] for keys in lists for key in keys}
    for keys in lists:
        for key, follower in pairwise(keys):
            after[key].append(follower)
    found: list[str] = []
    seen: set[str] = set()

    def visit(key: str) -> None:
        if key not in seen:
            seen.add(key)
            for follower in after[key]:
                visit(follower)
            found.append(key)

    for key in reversed(after):
        visit(key)
    return found[::-1]


def text_of(value: Any, indent: str = "") -> str:
    """JSON with one key a line: an object is broken only where it is longer than 200 characters."""
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict) or len(flat) <= 200:
        return flat
    inner = indent + " "
    lines = (
        f"{inner}{json.dumps(key, ensure_ascii=False)}: {text_of(entry, inner)}"
        for key, entry in value.items()
    )
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def render(packages: Sequence[Path], *, fetched: bool = False) -> str:
    """The text of the file, from these source packages, all that is fetched, or the installed DeepSpeed."""
    sources = [ReleaseSource.packed(path) for path in packages]
    sources = [*sources, *fetched_sources()] if fetched else sources or [ReleaseSource.installed()]
    made = schemas(sources, json.loads(OVERLAY.read_text(encoding="utf-8")))
    names = [schema.name_of(release) for release in made]
    return text_of({schema.RELEASES: names, **merged(made)}) + "\n"


def fetched_sources() -> list[ReleaseSource]:
    """Every release that tools/releases has fetched, from the oldest that there are schemas of."""
    from tools.releases.config_facts import OLDEST, release_source
    from tools.releases.fetch import Cache
    from tools.releases.packages import PACKAGES

    cache = Cache(PACKAGES[PACKAGE])
    releases = [source.release for source in cache.sources()]
    return [release_source(cache, release) for release in releases if schema.minor_of(release) >= OLDEST]


def write_or_check(file: Path, text: str, *, check: bool) -> int:
    """Write a generated file, or show how it differs from what it should be; the exit status."""
    if not check:
        write_atomic(file, text)
        return 0
    old = file.read_text(encoding="utf-8") if file.exists() else ""
    sys.stdout.writelines(
        difflib.unified_diff(old.splitlines(True), text.splitlines(True), file.name, "generated")
    )
    return int(old != text)


def main(arguments: list[str] | None = None) -> int:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tools.schemas.generate",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("packages", metavar="PACKAGE", nargs="*", type=Path, help="deepspeed-X.Y.Z.tar.gz")
    parser.add_argument(
        "--fetched",
        action="store_true",
        help="read the releases of `python -m tools.releases fetch deepspeed`",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it isn't current")
    given = parser.parse_args(arguments)
    try:
        text = render(given.packages, fetched=given.fetched)
    except (DsrunError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return write_or_check(SCHEMAS, text, check=given.check)


if __name__ == "__main__":
    sys.exit(main())
