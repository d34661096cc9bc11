"""DS011-DS018: keys that have no effect where they stand, and files that are no deepspeed.json, or not yet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache

from dsrun.config import tree
from dsrun.config.rules.common import removal, set_to
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Edit, Finding, Fix, bad, good, rule
from dsrun.config.schemas import foreign, schema
from dsrun.config.schemas.guess import guess, has_keys_of
from dsrun.config.schemas.schema import Schema, properties_of
from dsrun.config.schemas.violations import fits
from dsrun.words import listed

TREATED = (
    "zero_optimization.cpu_offload",
    "zero_optimization.legacy_stage1",
    "zero_optimization.stage3_gather_fp16",
)
"""Deprecated keys that the rules of ZeRO check."""

NEVER_ASKED = (
    "data_efficiency",
    "data_efficiency.data_sampling",
    "data_efficiency.data_routing",
    "comms_logger",
)
"""Sections whose `enabled` is never read: they have their own rules."""

ELSEWHERE = ("fp16", "bf16", "torch_autocast", "msamp")
"""Sections whose `enabled` the rules of precision check, or accelerate reads."""

LEFT_OPEN = re.compile(r"~(/|$)|\$\{?[A-Za-z_]|\{\{.*\}\}|<[^<>]+>$")
"""A placeholder that some tool was meant to fill in: a home folder, a variable, a template's field."""

COMMENT = ("_", "//", "#", "x-", "$schema")
"""How keys begin that are comments, or an editor's."""

OPENERS = frozenset("~${<")
"""The characters that a placeholder begins with; most strings have none of them."""

DISK = "nvme_path"
"""A key whose paths a rule of offloading checks."""

ENOUGH = 2
"""The number of keys of one tool that tell whose file it is."""


@rule("DS011", "warning")
@bad({"zero_optimization": True, "allgather_size": 500000000}, {"allgather_size": 1})
@good(
    {"zero_optimization": {"stage": 1, "allgather_bucket_size": 500000000}},
    {"zero_optimization": {"stage": 1}},
)
def deprecated_key(context: Context) -> Iterator[Finding]:
    """Fields marked deprecated still work, with a line in the log (runtime/config_utils.py, runtime/zero/config.py)."""
    for path in context.schema.marked("deprecated"):
        if not path.startswith(TREATED) and context.has(path):
            about = context.schema.describe(path)[1]
            yield Finding(path, "is deprecated", f"Replace it: {about[:1].lower()}{about[1:]}")


@rule("DS012", "warning")
@bad({"disable_allgather": True}, {"pipeline": {"stages": 2}})
@good({"pipeline": {"activation_checkpoint_interval": 1}}, {"pipeline": {"pipe_partitioned": False}})
def key_without_effect(context: Context) -> Iterator[Finding]:
    """Keys that runtime/config.py stores and nothing reads (runtime/pipe/engine.py reads four of `pipeline`)."""
    for path in context.schema.marked("x-no-effect"):
        node = context.schema.nodes[path]
        # A value that equals the default misleads nobody.
        if context.has(path) and context.get(path) != node.get("default", tree.MISSING):
            fix = removal(context, path, safe=path not in ELSEWHERE)
            yield Finding(path, "has no effect", f"Remove it. {node['x-no-effect']}", fix)


@rule("DS013", DIFFERS)
@bad({"zero_optimization.stage": 3}, {"zero_optimization": {"stage": 2, "offload_optimizer.device": "cpu"}})
@good({"zero_optimization": {"stage": 3}}, {"_zero_optimization.stage": 3})
def dots_in_a_key(context: Context) -> Iterator[Finding]:
    """A key is looked up exactly as written (runtime/config.py): dots don't open sections."""
    for violation in context.violations:
        if violation.kind == "dotted":
            effect = REFUSED if violation.refused else DIFFERS
            yield Finding(violation.path, violation.message, violation.suggestion, effect=effect)


@rule("DS014", "warning")
@bad({"tensorboard": {"output_path": "runs"}}, {"flops_profiler": {"profile_step": 5}})
@good({"tensorboard": {"enabled": True, "output_path": "runs"}}, {"flops_profiler": {}})
def section_not_enabled(context: Context) -> Iterator[Finding]:
    """These sections are off without `enabled` (monitor/config.py, profiling/config.py, autotuning/config.py).

    With `enabled: false` this is only a note: templates are written that way.
    """
    for path in _switched(context.schema):
        section = context.section(path)
        if not section or section.get("enabled", False) is not False:
            continue
        rest = [key for key in known_keys(context, path) if key != "enabled"]
        if not rest:
            continue
        advice = f"Set {path}.enabled to true, or remove the section."
        if "enabled" in section:
            yield Finding(
                path,
                f"is off (enabled is false), so these have no effect: {', '.join(rest)}",
                advice,
                severity="note",
            )
        else:
            fix = set_to(context, f"{path}.enabled", value=True)
            yield Finding(
                path, f"is off without enabled, so these have no effect: {', '.join(rest)}", advice, fix
            )


@rule("DS015", "warning")
@bad(
    {"deepspeed": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}},
    {"ds_config": {"bf16": {"enabled": True}, "steps_per_print": 10}},
)
@good(
    {"zero_optimization": {"stage": 2}, "steps_per_print": 10},
    {"_old": {"bf16": {"enabled": True}, "steps_per_print": 10}},
)
def config_inside_a_key(context: Context) -> Iterator[Finding]:
    """DeepSpeed looks for its keys at the top level only (runtime/config.py)."""
    for key, value in context.config.items():
        if key.startswith("_") or not isinstance(value, Mapping) or context.schema.node(key) is not None:
            continue
        inner = [name for name in value if context.schema.node(name) is not None]
        if len(inner) >= ENOUGH:
            fix = Fix(tuple(Edit("move", f"{key}.{name}", name) for name in inner), safe=False)
            yield Finding(
                key,
                f"holds {len(inner)} of DeepSpeed's own keys ({', '.join(inner[:3])})",
                "Move them to the top level: DeepSpeed looks for them there.",
                fix,
            )


def configures_nothing(context: Context) -> bool:
    """Whether a file is no deepspeed.json: it has keys, and none is DeepSpeed's or a slip of one."""
    keys = [key for key in context.config if not key.startswith(COMMENT)]
    counted = Counter(known.file for key in keys if (known := foreign.lookup(key)))
    another = bool(counted) and counted.most_common(1)[0][1] >= ENOUGH
    return bool(keys) and not any(_is_meant(context, key, another=another) for key in keys)


def _is_meant(context: Context, key: str, *, another: bool) -> bool:
    """Whether a key is DeepSpeed's or a slip of one. another: the file looks like another tool's, which may have a key
    of the same name with another kind of value.
    """
    value = context.config[key]
    node = context.schema.node(key)
    if node is not None:
        return not another or (fits(node, value) and has_keys_of(node, value))
    if key.partition(".")[0] in context.schema.root["properties"] or context.schema.removed(key):
        return True
    if isinstance(value, Mapping) and any(context.schema.node(name) is not None for name in value):
        return True
    meant = guess(context.schema, key).path
    node = context.schema.node(meant) if meant and "." not in meant else None
    if node is None or foreign.lookup(key):
        return False
    return has_keys_of(node, value) if isinstance(value, Mapping) else not properties_of(node)


@rule("DS016", "warning")
@bad(
    {
        "_bare": True,
        "_for": "hf",
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
    },
    {"_bare": True, "compute_environment": "LOCAL_MACHINE", "num_processes": 2},
)
@good({"steps_per_print": 10}, {"_bare": True, "_for": "lightning", "wall_clock_breakdown": True})
def no_deepspeed_config(context: Context) -> Iterator[Finding]:
    """A file without a single key that runtime/config.py reads configures nothing; often it is another tool's.

    Nothing else is said of such a file. DeepSpeed itself and HF Trainer stop at it.
    """
    keys = [key for key in context.config if not key.startswith(COMMENT)]
    advice = "A deepspeed.json has keys such as train_micro_batch_size_per_gpu and zero_optimization."
    if not keys:
        yield Finding("", "has no key that DeepSpeed reads", advice)
        return
    if not configures_nothing(context):
        return
    files = Counter(known.file for key in keys if (known := foreign.lookup(key)))
    like = next((f": it looks like {file}" for file, count in files.most_common(1) if count >= ENOUGH), "")
    stops = {"deepspeed": REFUSED, schema.HF: FAILS}.get(context.target, "")
    severity = "error" if stops else "warning"
    yield Finding(keys[0], f"has no key of DeepSpeed's{like}", advice, severity=severity, effect=stops)


@rule("DS017", "warning")
@bad(
    {"tensorboard": {"enabled": True, "output_path": "~/runs"}},
    {"csv_monitor": {"enabled": True, "output_path": "${HOME}/runs"}},
)
@good(
    {"tensorboard": {"enabled": True, "output_path": "runs/a~b"}},
    {"wandb": {"enabled": True, "project": "cost in $"}},
)
def placeholder_left_in(context: Context) -> Iterator[Finding]:
    """Strings are used as written: no os.path.expanduser or expandvars (monitor/tensorboard.py, csv_monitor.py)."""
    for path, value in tree.leaves(context.config):
        if not isinstance(value, str) or OPENERS.isdisjoint(value):
            continue
        if path.endswith(DISK) or any(key.startswith("_") for key in path.split(".")):
            continue
        if LEFT_OPEN.match(value) or LEFT_OPEN.search(value.lstrip("~")):
            yield Finding(path, f'is "{value}", which is used literally', "Write the value itself.")


@rule("DS018", REFUSED)
@bad(
    {"_bare": True, "train_batch_size": "GBSIZE", "zero_optimization": {"stage": "ZERO_STAGE"}},
    {"_text": '{\n"train_batch_size": GBSIZE,\n"steps_per_print": 10\n}'},
)
@good({"wandb": {"enabled": True, "project": "GPT"}}, {"optimizer": {"type": "LAMB"}})
def template_not_filled_in(context: Context) -> Iterator[Finding]:
    """A script was meant to put values in, as in Megatron-DeepSpeed's examples. Nothing is concluded from their places.

    DeepSpeed stops at most of them (runtime/config.py), and computes with the others.
    """
    left = [violation for violation in context.violations if violation.kind == "placeholder"]
    if left:
        names = list(dict.fromkeys(violation.value.rstrip(",") for violation in left))
        refused, fails = (
            any(violation.refused for violation in left),
            any(violation.fails for violation in left),
        )
        text = f"this is a template: values are missing for {listed(names)}"
        effect = REFUSED if refused else FAILS if fails else DIFFERS
        advice = "Fill it in as its script does, and check the result."
        yield Finding(left[0].path, text, advice, effect=effect)


def known_keys(context: Context, section: str) -> list[str]:
    """The keys of a section that are DeepSpeed's: neither comments nor slips, of which DS001 speaks."""
    return [key for key in context.section(section) if context.schema.node(f"{section}.{key}") is not None]


@cache
def _switched(known: Schema) -> tuple[str, ...]:
    """The sections that are off by default and have an `enabled`."""
    off = (
        path.rpartition(".")[0]
        for path in known.homes["enabled"]
        if known.nodes[path].get("type") == "boolean" and known.nodes[path].get("default") is False
    )
    return tuple(section for section in off if section not in (*NEVER_ASKED, *ELSEWHERE))
