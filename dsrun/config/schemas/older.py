"""Make the JSON Schemas of older DeepSpeeds, each from its own published source package.

    python -m dsrun.config.schemas.older --sources DIR                 write the schema files
    python -m dsrun.config.schemas.older --sources DIR --check         exit 1 with a diff if one is not current
    python -m dsrun.config.schemas.older --sources DIR --index URL     fetch what DIR lacks, then write

DIR holds the packages as they were published: deepspeed-0.14.5.tar.gz and so on. URL is that of a package
index's simple pages, as pip takes it in --index-url. (pip download doesn't do: it runs the packages' setup,
and the old ones fail beside today's libraries.)

What a release knows is read from its code (source.py). Order, descriptions and the rest come from the
overlay of the newest version, and overlay-older.json adds what only older ones have:

properties
    Keys that are gone, in the form of the newest overlay. "taken_until" says that a key is accepted up to
    that version though nothing in it reads the key.
changes
    What was different of a key "until" a version: keywords in place of the newest overlay's.
removed
    What to do instead of a key that an older version had, for those that the newest overlay doesn't name.

A key that a release reads and that stands in neither overlay stops the generation. Two lists are worked out
by comparing the schemas: "x-removed", keys that an earlier version had and this one doesn't, and
"x-added-later", keys that only a later version brought.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsrun.config.schemas import generate
from dsrun.config.schemas.generate import (
    COMMENTS,
    NO_DEFAULT,
    Builder,
    Known,
    Node,
    join,
    nodes,
    without_auto,
)
from dsrun.config.schemas.source import PACKAGE, Model, Read, Source
from dsrun.errors import DsrunError, Problem
from dsrun.files import write_atomic

OVERLAY = generate.HERE / "overlay-older.json"
# The last of each minor version, oldest first.
RELEASES = (
    "0.9.5",
    "0.10.3",
    "0.11.2",
    "0.12.6",
    "0.13.5",
    "0.14.5",
    "0.15.4",
    "0.16.9",
    "0.17.6",
    "0.18.9",
)


@dataclass(frozen=True)
class Block:
    """Where a block is read key by key: a file and the block's names in it; no names mean any.

    whole: those names are used for no other block, so every key asked of them has to be in an overlay.
    keys: only these are asked of this block, anything else of other blocks under the same name.
    """

    file: str
    names: tuple[str, ...] = ()
    whole: bool = True
    keys: tuple[str, ...] = ()

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
# Asked of a section that a function calls param_dict too.
ELSEWHERE = frozenset(("mode", "attention", "eigenvalue"))
# Read by others than DeepSpeed, or by what the code builds from them: the same in every version.
COPIED = frozenset(("optimizer.params", "scheduler.params", "inference", "msamp"))
# Where a model of the newest overlay stood before, in another shape.
FORMER = {"deepspeed.compile.config:CompileConfig": "deepspeed.runtime.compiler:CompileConfig"}


def minor(version: str) -> tuple[int, int]:
    major, second = version.split(".")[:2]
    return int(major), int(second)


def short(version: str) -> str:
    return ".".join(map(str, minor(version)))


class OlderBuilder(Builder):
    """Joins the overlays with what a release's code says, leaving out what it doesn't know."""

    def __init__(self, source: Source, overlay: Node, newest: Node) -> None:
        self.source = source
        self.overlay = overlay
        self.newest = dict(nodes(newest))
        self.problems: list[Problem] = []

    def schema(self) -> Node:
        """The schema without the lists that need the other versions."""
        properties = self.properties(self.overlay, None, "")
        if self.problems:
            raise DsrunError(
                Problem(problem.what, f"{self.source.version}: {problem.where}") for problem in self.problems
            )
        name = short(self.source.version)
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"https://dsrun.invalid/schemas/{schema_file(name).name}",
            "title": f"DeepSpeed {name} configuration",
            "description": self.overlay["description"],
            "x-deepspeed-version": self.source.version,
            "type": "object",
            "additionalProperties": False,
            "patternProperties": COMMENTS,
            "properties": {
                **properties,
                "$schema": {"description": "Where an editor finds this schema.", "type": "string"},
            },
        }

    def known_keys(self, entry: Node, model: Any, path: str) -> dict[str, Known]:
        if model is not None:
            return self.source.fields(model)
        if path == "pipeline":
            found = self.source.local(CONFIG, "get_pipeline_config", "default_pipeline")
            return {name: Known(default=default) for name, default in found.items()}
        known: dict[str, Known] = {}
        for block in blocks(path):
            for read in self.source.reads(block.file):
                child = entry["properties"].get(read.key)
                expected = "read_by" not in child if child else block.whole and read.key not in ELSEWHERE
                if expected and block.asks(read):
                    found = known.setdefault(read.key, Known())
                    if found.default is NO_DEFAULT:
                        found.default = read.default
        return known

    def properties(self, entry: Node, model: Any, path: str) -> Node:
        known = self.known_keys(entry, model, path)
        names = {info.alias or name for name, info in known.items()}
        entries: Node = {}
        for name, child in entry["properties"].items():
            if self.has(child, name, names, join(path, name)):
                entries[name] = {"read_by" if key == "taken_until" else key: child[key] for key in child}
        return super().properties({**entry, "properties": entries}, model, path)

    def has(self, entry: Node, name: str, known: set[str], path: str) -> bool:
        """Whether the release accepts a key."""
        if name in known or path in COPIED or entry.get("alias_of") in known:
            return True
        if "taken_until" in entry:
            return minor(self.source.version) <= minor(entry["taken_until"])
        return "read_by" in entry and self.source.mentions(name)

    def node(self, entry: Node, known: Known, path: str) -> Node:
        if path in COPIED:
            return copy.deepcopy(self.newest[path])
        if not known.keywords and path in self.newest:  # not a model's field in this version
            same = without_auto(self.newest[path])
            known = replace(known, keywords={"type": same["type"]} if "type" in same else {})
        return super().node(entry, known, path)

    def model(self, entry: Node) -> Model | None:
        target = entry.get("model", "")
        models = [Model(*place(name)) for name in (target, FORMER.get(target, "")) if name]
        return next((model for model in models if self.source.has(model)), None)

    def rejects_unknown(self, model: Any) -> bool:
        return self.source.rejects_unknown(model)

    def collection(self, target: str) -> list[Any]:
        found = self.source.value(*self.source.find(*place(target)))
        if found is NO_DEFAULT:
            self.problems.append(Problem("can't be read", target))
            return []
        return [*found]


def blocks(path: str) -> tuple[Block, ...]:
    """Where the block at `path` is read: its own places, or those of a block around it."""
    while path not in BLOCKS and "." in path:
        path = path.rpartition(".")[0]
    return BLOCKS.get(path, ())


def place(target: str) -> tuple[str, str]:
    """The file and the name behind "deepspeed.module:name"."""
    module, _, name = target.partition(":")
    return module.removeprefix(f"{PACKAGE}.").replace(".", "/") + ".py", name


def schema_file(name: str) -> Path:
    return generate.HERE / f"deepspeed-{name}.schema.json"


def overlay_for(version: str, newest: Node, older: Node) -> Node:
    """The newest overlay with the keys that are gone and what was different in a version."""
    overlay = copy.deepcopy(newest)
    merge(overlay["properties"], older["properties"])
    for change in older["changes"]:
        if minor(version) <= minor(change["until"]):
            entry = overlay
            for name in change["path"].split("."):
                entry = entry["properties"][name]
            entry.update({key: value for key, value in change.items() if key not in ("path", "until")})
    return overlay


def merge(entries: Node, more: Node) -> None:
    """Add keys to those of an overlay; a section that is there already gets the new keys inside it."""
    for name, entry in more.items():
        if name in entries:
            merge(entries[name]["properties"], entry["properties"])
        else:
            entries[name] = copy.deepcopy(entry)


def add_lists(schemas: Mapping[str, Node], advice: Mapping[str, str], renamed: Mapping[str, str]) -> None:
    """Write x-removed, x-renamed and x-added-later into all schemas but the last one. Oldest first."""
    keys = {name: dict.fromkeys(path for path, _ in nodes(schema)) for name, schema in schemas.items()}
    names = [*schemas]
    ever = {path for known in keys.values() for path in known}
    problems = []
    for number, name in enumerate(names[:-1]):
        earlier = (path for other in names[:number] for path in keys[other])
        gone = [*topmost(dict.fromkeys(path for path in earlier if path not in keys[name]))]
        gone += [path for path in advice if path not in ever]
        problems += [Problem("no advice", f"{name}: {path}") for path in gone if path not in advice]
        schemas[name]["x-removed"] = {path: advice.get(path, "") for path in gone}
        schemas[name]["x-renamed"] = {old: new for old, new in renamed.items() if old in gone}
        later = {path: other for other in reversed(names[number + 1 :]) for path in keys[other]}
        added = dict.fromkeys(path for path in later if path not in keys[name])
        schemas[name]["x-added-later"] = {path: later[path] for path in sorted(topmost(added))}
    if problems:
        raise DsrunError(problems)


def topmost(paths: Mapping[str, Any]) -> Iterator[str]:
    """The paths that don't lie below another one of them."""
    for path in paths:
        parts = path.split(".")
        if not any(".".join(parts[:count]) in paths for count in range(1, len(parts))):
            yield path


def schemas(folder: Path) -> dict[str, Node]:
    """Minor version -> schema, oldest first and the newest, checked-in one last."""
    newest = json.loads(generate.SCHEMA.read_text(encoding="utf-8"))
    overlay = json.loads(generate.OVERLAY.read_text(encoding="utf-8"))
    older = json.loads(OVERLAY.read_text(encoding="utf-8"))
    found = {}
    for version in RELEASES:
        path = archive(folder, version)
        if not path.is_file():
            raise DsrunError("is missing", where=str(path), hint="--index URL fetches it.")
        fitting = overlay_for(version, overlay, older)
        found[short(version)] = OlderBuilder(Source(path), fitting, newest).schema()
    found[short(newest["x-deepspeed-version"])] = newest
    add_lists(found, {**overlay["removed"], **older["removed"]}, overlay["renamed"])
    return found


def archive(folder: Path, version: str) -> Path:
    return folder / f"{PACKAGE}-{version}.tar.gz"


def fetch(folder: Path, index: str) -> None:
    """Download the source packages that are missing in a folder."""
    page = f"{index.rstrip('/')}/{PACKAGE}/"
    links = re.findall(r'href="([^"#]+)', download(page).decode("utf-8"))
    for path in (archive(folder, version) for version in RELEASES):
        for link in links:
            if link.endswith(f"/{path.name}") and not path.exists():
                path.write_bytes(download(urllib.parse.urljoin(page, link)))


def download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - an address that the caller named
        content: bytes = answer.read()
    return content


def main(arguments: list[str] | None = None) -> int:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m dsrun.config.schemas.older",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sources", metavar="DIR", type=Path, required=True, help="where the packages lie")
    parser.add_argument("--index", metavar="URL", help="where to fetch missing packages from")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    given = parser.parse_args(arguments)
    try:
        if given.index:
            fetch(given.sources, given.index)
        made = schemas(given.sources)
    except (DsrunError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    del made[[*made][-1]]  # the newest one is generate.py's
    texts = {
        schema_file(name): json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        for name, schema in made.items()
    }
    return check(texts) if given.check else write(texts)


def write(texts: Mapping[Path, str]) -> int:
    for path, text in texts.items():
        write_atomic(path, text)
        sys.stdout.write(f"{path}: {sum(1 for _ in nodes(json.loads(text)))} keys\n")
    return 0


def check(texts: Mapping[Path, str]) -> int:
    """Show how the files differ from what they should be; 1 if one does."""
    current = True
    for path, text in texts.items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        current = current and old == text
        sys.stdout.writelines(
            difflib.unified_diff(old.splitlines(True), text.splitlines(True), path.name, "generated")
        )
    return int(not current)


if __name__ == "__main__":
    sys.exit(main())
