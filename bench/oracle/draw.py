"""Configs drawn at random: a realistic one, keys of the schema added to it, then what people get wrong.

`draw(random.Random(seed))` gives the same config for the same seed.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from dsrun.config import tree
from dsrun.config.schemas import schema

Config = dict[str, Any]
Node = Mapping[str, Any]

RELEASE = os.environ.get("DSRUN_ORACLE_RELEASE", "")
"""The release of DeepSpeed that is asked, where it isn't the newest (releases.py)."""
SCHEMA = schema.load(schema.version_of(RELEASE) if RELEASE else None)
ZERO = "zero_optimization"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ODD_NUMBERS = (-1, 0, 1, 2, 3, 0.5, 1.5, 7, 8, 1e-8, -0.1, 2.0, 2e8, 2**31, 2**63, 1e30, -(10**6))
ODD_TEXTS = ("", "auto", "x", "None", "null", "true", "false", "yes", "0", "1", "3", "2.0", "5e8", "1e-3")
ODD_NAMES = ("cpu", "CPU", "fp16", "/tmp")
ODD_OTHERS = (None, True, False, [], [1], ["x"], {}, {"value": 1}, {"enabled": True})
ODD_VALUES: tuple[Any, ...] = (*ODD_OTHERS, *ODD_TEXTS, *ODD_NAMES, *ODD_NUMBERS)
TYPED = {"optimizer": ("optimizer.type", "Adam"), "scheduler": ("scheduler.type", "WarmupLR")}
"""Sections that mean something only with a type."""
CROSSING = (ZERO, ZERO, "bf16", "fp16", "gradient_allreduce_op", "compile", "data_efficiency", "checkpoint")
"""Keys that the checks across keys read."""
COMMENTS = ("_comment", "comment", "//", "#why", "my_note")
OFFLOAD = (
    {"device": "cpu"},
    {"device": "cpu", "pin_memory": True},
    {"device": "nvme", "nvme_path": "/tmp/nvme"},
    {"device": "none"},
)


@dataclass(frozen=True)
class Case:
    """A config and the number of ranks it is for. how: the names of the changes it went through."""

    config: Config
    world_size: int
    how: tuple[str, ...] = ()


def draw(rng: Random, *, changes: int = 5, world_sizes: tuple[int, ...] = (1, 2)) -> Case:
    """A case with up to so many changes, most often one."""
    world_size = rng.choice(world_sizes)
    config = base(rng, world_size)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        set_fitting(rng, config)
    count = min(changes, rng.choice((0, 1, 1, 1, 1, 2, 2, 3, 5)))
    names = rng.choices(list(CHANGES), weights=[weight for weight, _ in CHANGES.values()], k=count)
    for name in names:
        CHANGES[name][1](rng, config)
        config = config or batch(rng, world_size)
    return Case(json.loads(json.dumps(config)), world_size, tuple(names))


def singles() -> Iterator[Case]:
    """Every key of the schema by itself, at every odd value, at its bounds and at each choice it has."""
    for path in [*SCHEMA.paths, *(alias for alias, _ in aliases())]:
        node = SCHEMA.node(path) or {}
        choices = [choice for branch in node.get("anyOf", [node]) for choice in branch.get("enum", ())]
        values = [*ODD_VALUES, *edges(node), *choices, *node.get("x-known-values", ()), node.get("default")]
        for value in {json.dumps(value): value for value in values}.values():
            config: Config = {} if path in BATCH else {BATCH[1]: 1}
            if name := TYPED.get(path.partition(".")[0]):
                tree.put(config, name[0], name[1])
            tree.put(config, path, copy.deepcopy(value))
            yield Case(config, 1, ("one key",))


def base(rng: Random, world_size: int) -> Config:
    """A config as a careful person writes it."""
    config: Config = batch(rng, world_size)
    if rng.random() < 0.9:
        config[ZERO] = zero(rng)
    if (precision := rng.choice(("fp16", "bf16", "bf16", None))) and rng.random() < 0.9:
        config[precision] = {"enabled": True}
    if rng.random() < 0.8:
        config["optimizer"] = optimizer(rng)
    if "optimizer" in config and rng.random() < 0.4:
        config["scheduler"] = scheduler(rng, config["optimizer"]["params"]["lr"])
    if rng.random() < 0.5:
        config["gradient_clipping"] = rng.choice((0, 0.5, 1, 1.0))
    return config


def batch(rng: Random, world_size: int) -> Config:
    """One, two or all of the batch keys, that agree."""
    micro, steps = rng.choice((1, 2, 4)), rng.choice((1, 1, 2, 3))
    sizes = dict(zip(BATCH, (micro * steps * world_size, micro, steps), strict=True))
    left_out = rng.choice(((), BATCH[:1], BATCH[1:2], BATCH[2:], (BATCH[0], BATCH[2]), BATCH[1:]))
    return {key: size for key, size in sizes.items() if key not in left_out}


def zero(rng: Random) -> Config:
    stage = rng.choice((0, 1, 2, 2, 3, 3))
    section: Config = {"stage": stage}
    if stage and rng.random() < 0.4:
        section["offload_optimizer"] = copy.deepcopy(rng.choice(OFFLOAD))
    if stage == 3 and rng.random() < 0.4:
        section["offload_param"] = copy.deepcopy(rng.choice(OFFLOAD))
    if rng.random() < 0.4:
        section |= {
            "overlap_comm": rng.random() < 0.5,
            "contiguous_gradients": True,
            "reduce_bucket_size": 5e8,
        }
    return section


def optimizer(rng: Random) -> Config:
    name = rng.choice(("Adam", "AdamW", "AdamW", "adamw", "SGD", "Adagrad"))
    params: Config = {"lr": rng.choice((1e-3, 3e-5, 0.01))}
    if rng.random() < 0.5:
        params["weight_decay"] = rng.choice((0, 0.01))
    if name.startswith(("Adam", "adam")) and rng.random() < 0.5:
        params |= {"betas": [0.9, 0.999], "eps": 1e-8}
    return {"type": name, "params": params}


def scheduler(rng: Random, lr: float) -> Config:
    warmup = {"warmup_min_lr": 0, "warmup_max_lr": lr, "warmup_num_steps": 10}
    return rng.choice(
        (
            {"type": "WarmupLR", "params": warmup},
            {"type": "WarmupDecayLR", "params": {**warmup, "total_num_steps": 100}},
            {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
            {"type": "OneCycle", "params": {"cycle_min_lr": lr / 10, "cycle_max_lr": lr}},
        )
    )


# --- values ---------------------------------------------------------------------------------------------------------


def fitting(rng: Random, node: Node) -> Any:
    """A value that the schema takes at a node; not always one that makes sense."""
    if "anyOf" in node:
        branches = [branch for branch in node["anyOf"] if branch.get("const") != schema.AUTO]
        return fitting(rng, rng.choice(branches or node["anyOf"]))
    if "const" in node:
        return node["const"]
    if "enum" in node:
        return rng.choice(node["enum"])
    if "x-known-values" in node and rng.random() < 0.8:
        return rng.choice(node["x-known-values"])
    if node.get("default") is not None and rng.random() < 0.2:
        return copy.deepcopy(node["default"])
    return FITTING[rng.choice(sorted(schema.types(dict(node))))](rng, node)


def fitting_object(rng: Random, node: Node) -> Config:
    properties = node.get("properties", {})
    some = rng.sample(sorted(properties), k=min(len(properties), rng.choice((0, 1, 1, 2, 3))))
    wanted = sorted({*node.get("required", ()), *some})
    return {key: fitting(rng, properties[key]) for key in wanted if key in properties}


def fitting_array(rng: Random, node: Node) -> list[Any]:
    count = min(max(node.get("minItems", 0), rng.choice((0, 1, 2))), node.get("maxItems", 9))
    return [fitting(rng, node.get("items", {"type": "string"})) for _ in range(count)]


def fitting_number(rng: Random, node: Node, *, whole: bool = False) -> Any:
    """A number within the bounds, often one on the edge."""
    low = node.get("minimum", node.get("exclusiveMinimum", 0))
    high = node.get("maximum", node.get("exclusiveMaximum", max(low, 1) * 10 ** rng.choice((1, 1, 2, 4, 9))))
    if whole:
        first, last = int(low) + ("exclusiveMinimum" in node), int(high) - ("exclusiveMaximum" in node)
        return rng.choice((first, last, first + 1, rng.randint(first + 1, max(first + 1, last))))
    inside = low + (high - low) * rng.choice((0.1, 0.5, 0.9))
    return rng.choice([inside, *(node[key] for key in ("minimum", "maximum") if key in node)])


FITTING: dict[str, Callable[[Random, Node], Any]] = {
    "object": fitting_object,
    "array": fitting_array,
    "string": lambda rng, _: rng.choice(("x", "out", "weight")),
    "boolean": lambda rng, _: rng.random() < 0.5,
    "integer": lambda rng, node: fitting_number(rng, node, whole=True),
    "number": fitting_number,
    "null": lambda _, __: None,
}


def edges(node: Node) -> list[Any]:
    """The numbers at a node's bounds and beside them; around 0 where it has none."""
    branches = [branch for branch in node.get("anyOf", [node]) if "const" not in branch]
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    bounds = [branch[name] for branch in branches for name in names if name in branch] or [0]
    return [
        number
        for bound in bounds
        for number in (bound, bound - 1, bound + 1, bound - 0.5, bound + 0.5, float(bound))
    ]


def past_the_edge(rng: Random, node: Node) -> Any:
    """A number at, just past or far past a bound of a node."""
    return rng.choice((*edges(node), *ODD_NUMBERS))


def retyped(rng: Random, value: Any) -> Any:
    """The same value as another type, or something of another type."""
    options: list[Any] = [None, [value], {"value": value}, {"enabled": value}, str(value), "auto", [], {}]
    if isinstance(value, bool):
        options += [str(value).lower(), str(value).lower(), int(value), float(value), "yes", "off", ""]
    elif isinstance(value, (int, float)):
        options += [
            str(value),
            f"{value:e}",
            f" {value} ",
            float(value),
            value + 0.5,
            -value,
            0,
            bool(value),
            not value,
        ]
    elif isinstance(value, str):
        options += [value.upper(), value.title(), f" {value}", value[:-1], value + "s", True, 1, 0.5]
    elif isinstance(value, dict):
        options += [True, False, "x", 1, list(value), [value], json.dumps(value), *value.values()]
    return copy.deepcopy(rng.choice(options))


# --- places ---------------------------------------------------------------------------------------------------------


def places(config: Config, prefix: str = "") -> list[str]:
    """The path of every key, sections included."""
    found = []
    for key, value in config.items():
        path = f"{prefix}{key}"
        found.append(path)
        if isinstance(value, dict):
            found += places(value, f"{path}.")
    return found


def at(config: Config, section: str) -> Config:
    """The section at a path; the config itself for ""."""
    return tree.get(config, section) if section else config


def sections(config: Config) -> list[str]:
    """The path of every section, "" (the top level) included."""
    return ["", *(path for path in places(config) if isinstance(tree.get(config, path), dict))]


def take(config: Config, path: str) -> Any:
    """Remove a key and return what stood there."""
    section, _, key = path.rpartition(".")
    return at(config, section).pop(key)


@lru_cache(maxsize=1)
def aliases() -> list[tuple[str, str]]:
    """(path of the alias, path of what it stands for), of every alias."""
    found: list[tuple[str, str]] = []

    def walk(node: Node, prefix: str) -> None:
        for key, child in node.get("properties", {}).items():
            if name := child.get("x-alias-of"):
                found.append((prefix + key, prefix + name))
            walk(child, f"{prefix}{key}.")

    walk(SCHEMA.root, "")
    return found


@lru_cache(maxsize=1)
def older() -> list[tuple[str, Node]]:
    """(path, node) of every key of an older version that the newest hasn't got."""
    found: dict[str, Node] = {}
    for version in schema.versions():
        old = schema.load(version)
        found |= {path: old.node(path) or {} for path in old.paths if SCHEMA.node(path) is None}
    return sorted(found.items(), key=lambda entry: entry[0])


@lru_cache(maxsize=1)
def flags() -> list[str]:
    """The path of every key that takes true or false."""
    return [path for path in SCHEMA.paths if schema.types(SCHEMA.node(path) or {}) == {"boolean"}]


def somewhere(rng: Random) -> str:
    """A path of the schema: a section first, then a key of it, so that big sections don't outweigh the others."""
    top = rng.choice(list(SCHEMA.root["properties"]))
    return rng.choice([path for path in [*SCHEMA.paths, top] if tree.under(path, top)])


# --- changes --------------------------------------------------------------------------------------------------------


def set_fitting(rng: Random, config: Config) -> None:
    path = somewhere(rng)
    tree.put(config, path, fitting(rng, SCHEMA.node(path) or {}))


def set_odd(rng: Random, config: Config) -> None:
    tree.put(config, somewhere(rng), copy.deepcopy(rng.choice(ODD_VALUES)))


def set_past_the_edge(rng: Random, config: Config) -> None:
    path = somewhere(rng)
    while not schema.types(SCHEMA.node(path) or {}) & {"integer", "number"}:
        path = rng.choice(SCHEMA.paths)
    tree.put(config, path, past_the_edge(rng, SCHEMA.node(path) or {}))


def set_retyped(rng: Random, config: Config) -> None:
    """A fitting value of some key, as another type."""
    path = somewhere(rng)
    tree.put(config, path, retyped(rng, fitting(rng, SCHEMA.node(path) or {})))


def retype(rng: Random, config: Config) -> None:
    path = rng.choice(places(config))
    tree.put(config, path, retyped(rng, tree.get(config, path)))


def misspelt(rng: Random, key: str) -> str:
    """A key as someone else would type it."""
    at = rng.randrange(len(key)) if key else 0
    words = key.split("_")
    return rng.choice(
        (
            key[:at] + key[at + 1 :],
            key[:at] + key[at : at + 1] * 2 + key[at + 1 :],
            key[:at] + key[at + 1 : at + 2] + key[at : at + 1] + key[at + 2 :],
            key.upper(),
            key.title(),
            key.replace("_", "-"),
            key.replace("_", ""),
            words[0] + "".join(word.title() for word in words[1:]),
            key + "s",
            key.removesuffix("s").removesuffix("d"),
            key.removeprefix("stage3_"),
            "stage3_" + key,
            "use_" + key,
            "zero_" + key,
            key + " ",
            key.replace("ization", "isation"),
        )
    )


def rename(rng: Random, config: Config) -> None:
    path = rng.choice(places(config))
    section, _, key = path.rpartition(".")
    value = take(config, path)
    at(config, section)[misspelt(rng, key)] = value


def move(rng: Random, config: Config) -> None:
    """A key to another section, to the top, or one level up."""
    path = rng.choice(places(config))
    section, _, key = path.rpartition(".")
    value = take(config, path)
    up = section.rpartition(".")[0] if section else rng.choice(sections(config))
    target = rng.choice((up, "", rng.choice(sections(config))))
    at(config, target)[key] = value


def set_elsewhere(rng: Random, config: Config) -> None:
    """A key of the schema in a section that isn't its own."""
    path = rng.choice(SCHEMA.paths)
    target = rng.choice(sections(config))
    at(config, target)[path.rpartition(".")[2]] = fitting(rng, SCHEMA.node(path) or {})


def set_unknown(rng: Random, config: Config) -> None:
    target = rng.choice(sections(config))
    key = rng.choice((*COMMENTS, "size", "enabled", "foo"))
    at(config, target)[key] = rng.choice(("text", True, 1))


def set_removed(rng: Random, config: Config) -> None:
    path = rng.choice(list(SCHEMA.root["x-removed"]))
    tree.put(
        config,
        path,
        copy.deepcopy(rng.choice((None, False, True, {}, {"enabled": False}, {"enabled": True}, 1))),
    )


def set_older(rng: Random, config: Config) -> None:
    path, node = rng.choice(older())
    tree.put(config, path, fitting(rng, node))


def set_alias(rng: Random, config: Config) -> None:
    """A second name instead of the first, or beside it."""
    alias, name = rng.choice(aliases())
    node = SCHEMA.node(name) or {}
    tree.put(config, alias, fitting(rng, node))
    if rng.random() < 0.5:
        tree.put(config, name, fitting(rng, node))


def switch(rng: Random, config: Config) -> None:
    """Some flags to what they are not."""
    for path in rng.sample(flags(), k=rng.choice((1, 2, 3))):
        tree.put(config, path, not (SCHEMA.node(path) or {}).get("default"))


def switch_in_zero(rng: Random, config: Config) -> None:
    """Some keys of the sections that checks across keys look at."""
    for _ in range(rng.choice((1, 2, 3))):
        top = rng.choice(CROSSING)
        paths = [path for path in SCHEMA.paths if tree.under(path, top)]
        if not paths:  # an older release has no such section
            continue
        path = rng.choice(paths)
        tree.put(config, path, fitting(rng, SCHEMA.node(path) or {}))


def combine(rng: Random, config: Config) -> None:
    """Two or three whole sections."""
    for key in rng.sample(list(SCHEMA.root["properties"]), k=rng.choice((2, 3))):
        config[key] = fitting(rng, SCHEMA.root["properties"][key])


def spoil_batch(rng: Random, config: Config) -> None:
    key = rng.choice((*BATCH, "sequence_parallel_size", "data_parallel_size"))
    config[key] = rng.choice((0, -1, 1, 2, 3, 5, 8, 10, 2.0, 2.5, "2", "auto", None, True, False, [2], {}))


def drop(rng: Random, config: Config) -> None:
    take(config, rng.choice(places(config)))


CHANGES: dict[str, tuple[int, Callable[[Random, Config], None]]] = {
    "odd value": (10, set_odd),
    "past the edge": (10, set_past_the_edge),
    "another type at a key": (12, set_retyped),
    "another type": (8, retype),
    "misspelt": (8, rename),
    "moved": (5, move),
    "in a wrong section": (4, set_elsewhere),
    "unknown key": (3, set_unknown),
    "removed key": (2, set_removed),
    "older key": (4, set_older),
    "alias": (4, set_alias),
    "flags": (5, switch),
    "zero and precision": (10, switch_in_zero),
    "sections": (5, combine),
    "batch": (5, spoil_batch),
    "left out": (3, drop),
}
