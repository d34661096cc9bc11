"""Make the reference pages that follow from the code: presets, rules, config keys, commands, clusters' files ...

    python docs/generate.py            write them into docs/reference/
    python docs/generate.py --check    exit 1 and name the pages that are not current

In the pages of SHOWN, it renews what `dsrun plan` prints below its command; the rest of them is by hand. In the picture
of a terminal it renews what validate and plan print (docs/record.py).
Needs only what `dsrun` itself needs; neither torch nor DeepSpeed is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
os.environ.pop("DSRUN_PATH", None)  # The pages describe what ships, not the writer's own folders.

import combinations  # noqa: E402
import measured  # noqa: E402
import migration  # noqa: E402
import record  # noqa: E402

from dsrun import versions  # noqa: E402
from dsrun.catalog import files  # noqa: E402
from dsrun.cli import cli  # noqa: E402
from dsrun.cli.parsing.options import TableOption  # noqa: E402
from dsrun.config import rules, tree  # noqa: E402
from dsrun.config.presets import preset  # noqa: E402
from dsrun.config.presets.fsdp import FsdpPreset  # noqa: E402
from dsrun.config.rules.chinese import explanations  # noqa: E402
from dsrun.config.schemas import schema  # noqa: E402
from dsrun.files import write_atomic  # noqa: E402
from dsrun.host import hiding  # noqa: E402
from dsrun.jobs import launchers  # noqa: E402
from dsrun.jobs.diagnosis.signatures import HARMLESS, find_signatures  # noqa: E402
from dsrun.jobs.launchers.common import cluster_files, forwarded_environment, keys  # noqa: E402
from dsrun.jobs.launchers.kubernetes.pod_spec import PodSpec  # noqa: E402
from dsrun.options.commands import FinetuneOptions  # noqa: E402
from dsrun.options.declare import Entry, entries, flag_of  # noqa: E402
from dsrun.planner import gpus, terms  # noqa: E402
from dsrun.releases.config_changes import key_record  # noqa: E402
from dsrun.releases.packed import package  # noqa: E402
from tools import json_schemas  # noqa: E402
from tools.json_forms import FORMS  # noqa: E402
from tools.json_schemas import field_words  # noqa: E402

PAGES = ROOT / "docs" / "reference"
EXAMPLES = 2
"""Number of wrong examples of a rule on its page; the others are for the tests."""
SHOWN = ("docs/overview.md", "docs/overview.zh.md", "docs/howto/plan.md", "docs/howto/plan.zh.md")
"""Pages that show plans; of their tables only the rows of chosen presets (docs/record.py)."""
SHOWN_PLAN = re.compile(r"^(```sh\ndsrun (plan .+)\n```\n\n```text\n)(?:.*\n)*?(?=```$)", re.MULTILINE)
NOTE = "<!-- Made by docs/generate.py; change that or its sources, not this page. -->"


def cell(text: str) -> str:
    """A text inside a table: one line, no column ends."""
    return " ".join(text.split()).replace("|", "\\|")


def code(value: Any) -> str:
    """A value as JSON in code font."""
    return f"`{cell(json.dumps(value, ensure_ascii=False))}`"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table's lines, with an empty one behind it."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def header_comment(path: Path) -> list[str]:
    """The comment a preset file begins with, as Markdown: its indented lines are commands."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").removeprefix(" ")
        lines.append(f"    {text.strip()}" if text.startswith("  ") else text)
    return lines


def presets_page() -> Iterator[str]:
    """Every shipped preset: its own words, its chain, its keys."""
    yield "# Presets"
    yield ""
    yield "What `dsrun preset NAME` starts from. Each table shows the merged chain, before the options of the command"
    yield "line and `--set` are applied. The total batch size, which of fp16 and bf16 is written and, for NVMe, the"
    yield "folder and the size of a buffer come from the templates. All keys: [config-keys.md](config-keys.md)."
    yield ""
    for name, path in files("presets").items():
        chosen = preset.load(name)
        yield f"## {name}"
        yield ""
        yield f"{chosen.file.summary}."
        yield ""
        yield from header_comment(path)
        yield ""
        chain = " → ".join(
            f"[{file.path.stem}](../../presets/{file.path.name})" for file in reversed(chosen.chain)
        )
        yield f"Chain: {chain}" + ("" if len(chosen.chain) > 1 else " (extends nothing)")
        yield ""
        if chosen.requires:
            wanted = ", ".join(f"`--{option.replace('_', '-')}`" for option in sorted(chosen.requires))
            yield f"Requires: {wanted}"
            yield ""
        if chosen.defaults:
            said = " ".join(
                f"{flag_of(FinetuneOptions, key)} {value}" for key, value in chosen.defaults.items()
            )
            yield f"Beside its config, in `dsrun finetune`: `{said}`, unless you say otherwise."
            yield ""
        yield from fsdp_table(chosen) if chosen.fsdp else preset_tables(chosen)


def fsdp_table(chosen: preset.Preset) -> Iterator[str]:
    """The keys of a preset of FSDP's."""
    where = {key: file.path.stem for file in chosen.chain for key in file.fsdp or {}}
    shown = {key: value for key, value in dataclasses.asdict(chosen.fsdp).items() if key in where}
    does = field_words(FsdpPreset)
    rows = ([f"`fsdp.{key}`", code(value), where[key], cell(does[key])] for key, value in shown.items())
    yield from table(["key", "value", "from", "what it does"], rows)
    yield "Trained with FSDP: there is no deepspeed.json. [How to](../howto/fsdp.md)."
    yield ""


def preset_tables(chosen: preset.Preset) -> Iterator[str]:
    """The keys of a preset, then those that differ for HF Trainer."""
    values, origins = chosen.merged("deepspeed")
    rows = []
    for path, value in tree.leaves(values):
        if value == {}:
            continue  # a section without keys only names its place
        _, does = schema.load().describe(path)
        source = Path(origins[path]).stem
        rows.append([f"`{path}`", code(value), source, cell(does)])
    yield from table(["key", "value", "from", "what it does"], rows)
    hf, _ = chosen.merged("hf")
    other = [
        f"`{path}`" for path, value in tree.leaves(hf) if value == "auto" and tree.get(values, path) != "auto"
    ]
    yield f'With `--for hf` these are `"auto"`, for HF Trainer to fill in: {", ".join(other)}.'
    yield ""


def rules_page() -> Iterator[str]:
    """The index of rules; each has a page of its own in the site (docs/entries.py)."""
    found = rules.find_rules()
    yield "# Rules"
    yield ""
    yield f"What `dsrun validate` (and every command that makes a config) checks: {len(found)} rules. An *error* fails,"
    yield "or trains something else than the config says; a *warning* is without effect, deprecated or risky; a *note*"
    yield "is worth knowing. `dsrun explain DS101` shows one: what it does, why, examples, what to use instead, how"
    yield "safe the fix is, and the file of DeepSpeed (or of whoever reads the config) that it comes from. In the site"
    yield "each id leads to such a page."
    yield ""
    rows = [[f'<a id="{rule.id.lower()}"></a>{rule.id}', rule.severity, cell(rule.about)] for rule in found]
    yield from table(["id", "severity", "about"], rows)


def chinese_rules_page() -> Iterator[str]:
    """The rules that are explained in Chinese."""
    known = {rule.id: rule for rule in rules.find_rules()}
    found = explanations()
    yield "# 规则"
    yield ""
    yield f"真实的配置里最常见的 {len(found)} 条，用中文解释；[全部 {len(known)} 条](#全部规则)是英文的。"
    yield "*error* 会失败，或者训练的不是配置上写的；*warning* 不起作用、已过时或有风险；"
    yield "*note* 值得知道，`--level note` 才显示。终端里用 `LANG=zh_CN.UTF-8 dsrun explain DS101` 看其中一条。"
    yield ""
    yield from table(
        ["编号", "级别", "内容"],
        [[f"[{name}](#{name.lower()})", known[name].severity, one.title] for name, one in found.items()],
    )
    for name, one in found.items():
        yield f"## {name}"
        yield ""
        yield f"**{one.title}**（{known[name].severity}）"
        yield ""
        yield one.means
        yield ""
        yield f"怎么办：{one.next}"
        yield ""
        yield f"- 错误的例子：{code(known[name].bad[0])}"
        yield f"- 正确的例子：{code(known[name].good[0])}"
        yield ""
    yield "## 全部规则"
    yield ""
    yield from table(
        ["编号", "级别", "内容（英文）"],
        [[anchored(rule.id, found), rule.severity, rule.about] for rule in known.values()],
    )


def anchored(rule_id: str, explained: Iterable[str]) -> str:
    """A rule's id, as the place that links to it lead to where it has no section of its own."""
    return rule_id if rule_id in explained else f'<a id="{rule_id.lower()}"></a>{rule_id}'


def keys_page() -> Iterator[str]:
    """Every key of the schema, section by section."""
    found = schema.load().root
    yield "# Keys of deepspeed.json"
    yield ""
    yield f"Every key that DeepSpeed {found['x-deepspeed-version']} reads, from the schema that dsrun checks with."
    yield '*Default* is DeepSpeed\'s own, `-` where it has none. *auto*: HF Trainer fills in `"auto"` there.'
    yield "A key that begins with an underscore is a comment. *Since* is the release that brought it (none: 0.9.0),"
    yield "and defaults that it once had stand beside the one it has, as the releases' own code has them."
    yield ""
    plain = {key: node for key, node in found["properties"].items() if not node.get("properties")}
    sections = {key: node for key, node in found["properties"].items() if node.get("properties")}
    yield "## Top level"
    yield ""
    yield from keys_table((key, node) for key, node in plain.items())
    for key, node in sections.items():
        yield f"## {key}"
        yield ""
        if node.get("description"):
            yield node["description"]
            yield ""
        yield from keys_table(walk(node, key))
    yield "## Removed keys"
    yield ""
    yield "DeepSpeed stops at most of these, whatever their value; the others it ignores."
    yield ""
    gone: Mapping[str, str] = found.get("x-removed", {})
    refused = found.get("x-refused", ())
    yield from table(
        ["key", "last release with it", "DeepSpeed", "instead"],
        (
            [f"`{key}`", last_release(key), "stops" if key in refused else "ignores it", cell(advice)]
            for key, advice in gone.items()
        ),
    )


def last_release(key: str) -> str:
    """The last release of DeepSpeed that takes a key."""
    history = key_record(package("deepspeed"), key)
    return history.until if history else "before 0.9"


def walk(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(dotted path, schema node) below a section; a section inside stands before its own keys."""
    for key, child in node.get("properties", {}).items():
        yield f"{prefix}.{key}", child
        yield from walk(child, f"{prefix}.{key}")


def keys_table(nodes: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Path, type, default, auto, since, description."""
    rows = []
    for path, node in nodes:
        does = node.get("description", "")
        if alias := node.get("x-alias-of"):
            does = f"Another name of `{alias}`. {does}"
        default = code(node["default"]) if "default" in node else "-"
        history = key_record(package("deepspeed"), path)
        for value, when in history.former if history else ():
            default += f" (`{value}` in {when})"
        since = history.since if history else ""
        takes = cell(schema.expected(dict(node)))
        rows.append([f"`{path}`", takes, default, "yes" if node.get("x-auto") else "", since, cell(does)])
    return table(["key", "takes", "default", "auto", "since", "what it does"], rows)


def commands_page() -> Iterator[str]:
    """Every command with its arguments and options, from the command line's own description."""
    yield "# Commands"
    yield ""
    yield "What `dsrun COMMAND --help` says. Results go to stdout, everything else to stderr."
    yield "[Exit codes](exit-codes.md)."
    yield ""
    for name, command in commands(cli, "dsrun"):
        pieces = command.collect_usage_pieces(click.Context(command, info_name=name))
        yield f"## {name}"
        yield ""
        yield f"    {name} {' '.join(pieces)}"
        yield ""
        yield from help_text(command.help or "")
        if name == "dsrun finetune":
            yield "[Every option](options.md), and [what decides where you say nothing](finetune.md)."
            yield ""
            continue
        options = [option for option in command.params if isinstance(option, click.Option)]
        if options or not isinstance(command, click.Group):
            yield from table(["option", "takes", "what"], map(option_row, options))


def options_page() -> Iterator[str]:
    """Every option of finetune, from the table."""
    yield "# Options of finetune"
    yield ""
    yield "What `dsrun finetune --help-all` shows, in the same order; [how they work together](finetune.md). The key is"
    yield "the option's name in a [run file](finetune.md#the-run-file) and in a model file's `[defaults]`; without one"
    yield "it is for the command line alone."
    yield ""
    groups: dict[str, list[Entry]] = {}
    for entry in entries(FinetuneOptions).values():
        groups.setdefault(entry.group, []).append(entry)
    for group, found in groups.items():
        yield f"## {group}"
        yield ""
        yield from table(["option", "key", "takes", "default", "what"], map(entry_row, found))


def entry_row(entry: Entry) -> list[str]:
    """An option of the table: its flags, its key, what it takes, its default and its help."""
    flags = ", ".join(f"`{side}`" for flag in entry.flags for side in flag.split("/"))
    more = " Repeatable." if entry.repeated and "Repeatable" not in entry.option.help else ""
    default = cell(entry.default_words)
    key = "" if entry.option.command_line_only else f"`{entry.name}`"
    return [flags, key, entry_takes(entry), default, cell(entry.option.help + more)]


def entry_takes(entry: Entry) -> str:
    """Values that an option of the table takes, in words; empty for a switch."""
    if entry.kind is bool:
        return ""
    if entry.choices:
        return ", ".join(f"`{choice}`" for choice in entry.choices)
    unit = f" ({entry.option.unit})" if entry.option.unit else ""
    if entry.kind in (int, float):
        return cell(entry.takes + unit)
    return f"`{cell(entry.option.metavar)}`" if entry.option.metavar else entry.takes


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """The commands of a group with their whole names; a group inside stands before its own commands."""
    context = click.Context(group, info_name=name)
    for short in group.list_commands(context):
        if (command := group.get_command(context, short)) is None:
            continue
        yield f"{name} {short}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {short}")


def terms_page() -> Iterator[str]:
    """Every term of a plan: what it is, its formula, its source."""
    yield "# The planner's terms"
    yield ""
    yield "What `dsrun plan --components` adds up. Psi: weights; T: those with gradients; N: ranks; w: bytes of a"
    yield "weight that is computed with; b, s: micro batch and tokens of a row; L, h, v, f: layers, hidden size,"
    yield "vocabulary, feed-forward width; a: heads. A file alone is one of DeepSpeed 0.19. How they make a peak:"
    yield "[what fits](../explanation/what-fits.md)."
    yield ""
    parts = (
        ("On each GPU", terms.GPU),
        ("In a node's memory", terms.HOST),
        ("Seconds of a step", terms.SPEED),
    )
    for title, known in parts:
        yield f"## {title}"
        yield ""
        rows = [
            [f"`{name}`", cell(term.what), f"`{cell(term.formula)}`", cell(term.source)]
            for name, term in known.items()
        ]
        yield from table(["term", "what it is", "formula", "from"], rows)


def gpus_page() -> Iterator[str]:
    """Every kind of GPU that ships."""
    yield "# GPUs"
    yield ""
    yield "What `--gpu NAME` knows: the files in `presets/gpus/`. Rates are the data sheets', without sparsity; the"
    yield "link is what an all-reduce sees inside a node. Another GPU is one more file:"
    yield "[how to add](../../CONTRIBUTING.md#how-to-add)."
    yield ""
    rows = [
        [
            f"`{name}`", cell(gpu.summary), f"{gpu.memory_gib:g}", "yes" if gpu.bf16 else "no",
            f"{gpu.matrix_tflops:g}", f"{gpu.memory_gb_s:g}", f"{gpu.link} {gpu.link_gb_s:g}",
        ]
        for name, gpu in ((name, gpus.load(name)) for name in files(gpus.KIND))
    ]  # fmt: skip
    head = ["name", "GPU", "GiB", "bf16", "TFLOPS, 16 bits", "memory, GB/s", "link, GB/s"]
    yield from table(head, rows)


def versions_page() -> Iterator[str]:
    """Every combination of versions that is known to be bad."""
    yield "# Versions that don't go together"
    yield ""
    yield "Combinations of DeepSpeed, torch, transformers and others that are known to be bad: the files in"
    yield "`presets/versions/`. `dsrun doctor` judges what is installed on each machine, `dsrun finetune` and `dsrun"
    yield "launch` that and the job, `dsrun validate --with deepspeed==0.18.1,torch==2.8` a config. A lab's own are"
    yield "files in `presets/versions/` in a folder on `DSRUN_PATH`: [how to add](../../CONTRIBUTING.md#how-to-add)."
    yield ""
    for severity, means in versions.SEVERITIES.items():
        yield f"## {severity}: {means}"
        yield ""
        for found in versions.combinations().values():
            if found.severity == severity:
                yield from combination(found)


def combination(found: versions.Combination) -> Iterator[str]:
    """A combination: its versions, then what happens, what to do and who says so."""
    yield f"### {found.name}"
    yield ""
    yield ", ".join(f"{name} `{wanted}`" for name, wanted in found.packages.items())
    yield ""
    if found.when:
        yield f"- When: {found.when}"
    yield f"- What happens: {found.happens}"
    yield f"- What to do: {found.do}"
    links = ", ".join(f"<{source}>" for source in found.sources)
    yield f"- Known from: {found.basis}. {links}"
    if found.rule:
        yield f"- In configs: rule [{found.rule}](rules.md#{found.rule.lower()})"
    yield ""


def clusters_page() -> Iterator[str]:
    """Every key of a cluster's file."""
    yield "# A cluster's file"
    yield ""
    yield "What one cluster has differently from another: `launch/clusters/NAME.toml`, in the checkout or in a"
    yield "folder on `DSRUN_PATH`; `--cluster NAME` (or `DSRUN_CLUSTER`) uses it, and `--cluster ./FILE.toml` any"
    yield "file. What the command line says comes before it. Ready to copy, with comments:"
    yield (
        ", ".join(f"[{name}](../../launch/clusters/{name}.toml)" for name in files(cluster_files.KIND)) + "."
    )
    yield ""
    yield "`setup` is shell, so such a file is trusted as a script is. Everything else is checked, and everything"
    yield "that is wrong is said at once. Nothing in it may be secret: it is written into run folders."
    yield ""
    yield from table(["key", "takes", "default", "what it does"], key_rows(cluster_files.ClusterFile))
    yield "## [kubernetes]"
    yield ""
    yield 'For `launcher = "kubernetes"`: [how to](../howto/kubernetes.md).'
    yield ""
    yield from table(["key", "takes", "default", "what it does"], key_rows(PodSpec))


def key_rows(owner: type) -> Iterator[list[str]]:
    """Key, what it takes, its default, and what it does: the docstring below the field."""
    words = field_words(owner)
    for name, key in keys.keys_of(owner).items():
        usual = key.default is dataclasses.MISSING or key.default in (None, (), {}, "")
        yield [f"`{name}`", cell(key.takes), "" if usual else code(key.default), cell(words[name])]


def launchers_page() -> Iterator[str]:
    """Every launcher."""
    yield "# Launchers"
    yield ""
    yield "How dsrun starts its agent on a job's hosts: `--launcher NAME`. `auto`, the default, is `slurm` inside of"
    yield "Slurm's jobs, `local` on this machine alone, else `ssh`. Agents and training are the same with all:"
    yield "[how a job runs](../explanation/how-a-job-runs.md). [How to add](../../CONTRIBUTING.md#how-to-add) one."
    yield ""
    yield from table(["name", "program", "starts the agents with"], map(launcher_row, launchers.names()))


def launcher_row(name: str) -> list[str]:
    """Its name, what it needs, and the first paragraph of its module's docstring."""
    found = launchers.get(name)
    words = inspect.getdoc(importlib.import_module(f"{launchers.__name__}.{name}")) or ""
    needs = f"`{found.program}` ({found.package})" if found.program else ""
    return [f"`{name}`", needs, cell(words.split("\n\n")[0])]


def environment_page() -> Iterator[str]:
    """The user's variables that ranks on other hosts get."""
    yield "# Forwarded environment"
    yield ""
    yield "Ranks on other hosts get these of your variables, and what `--env NAME` or `--env NAME=VALUE` adds. What"
    yield "comes later wins: your environment, a cluster's file, `~/.deepspeed_env`, `.deepspeed_env` in this"
    yield "folder, `--env`. Values are passed as they are; no shell expands anything. `dsrun launch --dry-run` lists"
    yield "the names that are forwarded."
    yield ""
    yield "## What begins with"
    yield ""
    yield named(forwarded_environment.PREFIXES)
    yield ""
    yield "## These"
    yield ""
    yield named(forwarded_environment.NAMES)
    yield ""
    yield "The folder of dsrun's own Python comes first on `PATH`, unless it is there."
    yield ""
    yield "## Never"
    yield ""
    yield "What belongs to one machine or one process: `*VISIBLE_DEVICES`, `MV2_COMM_WORLD_*`, `WANDB_SERVICE`. And"
    yield "what each rank gets from dsrun, whoever asks for it:"
    yield f"{named(forwarded_environment.OURS)}."
    yield ""
    yield "## .deepspeed_env"
    yield ""
    yield "`NAME=VALUE`, one a line, as DeepSpeed's launcher reads it, in your home folder and in the one that you"
    yield "are in; `DS_ENV_FILE` is another name for it. It is read for jobs on named hosts, never written. Blank"
    yield "lines and lines that begin with `#` are fine. An error, with the line's number, is what would not arrive"
    yield "as it is written: a line without `=`, a value in quotes, with a `$VARIABLE` or a command for the shell, or"
    yield "with a comment behind it."
    yield ""
    yield "## Secrets"
    yield ""
    yield SECRETS.format(hidden=hiding.HIDDEN)


SECRETS = """\
A secret is told by its name (a variable's, an option's or a setting's with a word like `TOKEN`, `SECRET`,
`PASSWORD`, `API_KEY`, `CREDENTIALS` or `AUTH`), by the form that its issuer gave it (`hf_...`, `ghp_...`,
`AKIA...`, a JSON Web Token, a private key), or by its place in a URL or a header (a password, a signature,
`Authorization`). The rule is one for the terminal, pages, `--json`, `doctor` and the files of a run.

Variables that are secret are forwarded like the others, on no command line of dsrun's, and are in no log
of dsrun's and no file of the run folder that others can read; `--dry-run` shows `{hidden}`. Arguments of a
script are hidden in the same way: they stand in the run's `secrets.json`, which its owner alone can read,
and a colleague who continues the run is told which values are lacking. A cluster's file, the script for
Slurm and a manifest for Kubernetes never hold a secret: what looks like one is refused.

What your script itself prints goes into the logs of its ranks as it is, and is hidden where dsrun shows it.
Its arguments stand on its command line where another Python runs it (`--python`), as they would without dsrun."""


def signatures_page() -> Iterator[str]:
    """The index of signatures, by subject; each has a page of its own in the site (docs/entries.py)."""
    found = [one for one in find_signatures().values() if one.kind != HARMLESS]
    yield "# Signatures of failures"
    yield ""
    yield f"What `dsrun diagnose` knows: {len(found)} signatures. A *root* is a cause; a *symptom* is what another"
    yield "failure did to a rank, and counts where no root is there; a *tail* is an end without a reason, of which no"
    yield "cause is named. *Sure* is how sure the cause is; *again* says that the same job, started again, may go well."
    yield "`dsrun explain gpu-oom` shows one: how it looks, what to do, how to make sure, its source. In the site each"
    yield "id leads to such a page. Your own: [CONTRIBUTING](../../CONTRIBUTING.md)."
    yield ""
    for subject in sorted({one.subject for one in found}):
        yield f"## {subject.replace('_', ' ')}"
        yield ""
        rows = [
            [
                f'<a id="{one.id}"></a>{one.id}', cell(one.means), f"`{one.cause}`",
                f"{one.kind}, {one.confidence}{', again' if one.retry else ''}",
            ]
            for one in sorted((one for one in found if one.subject == subject), key=lambda one: one.id)
        ]  # fmt: skip
        yield from table(["id", "what it means", "class", "sure"], rows)


def named(variables: Iterable[str]) -> str:
    """Names of variables, sorted, in code font."""
    return ", ".join(f"`{name}`" for name in sorted(variables, key=lambda name: (name.lower(), name)))


def help_text(text: str) -> Iterator[str]:
    """A command's help as Markdown; what click shows as it stands (after \\b) are commands."""
    verbatim = False
    for line in inspect.cleandoc(text).splitlines():
        if line.strip() == "\b":
            verbatim = True
        else:
            verbatim = verbatim and bool(line.strip())
            yield f"    {line}" if verbatim else line
    yield ""


def option_row(option: click.Option) -> list[str]:
    """Names, type and help of an option."""
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    what = option.help or ""
    if option.show_default and option.default is not None:
        what += f" [default: {option.default}]"
    if option.multiple:
        what += " May be given several times."
    return [names, cell(takes(option)), cell(what)]


def takes(option: click.Option) -> str:
    """Values that an option takes, in words; empty for a flag."""
    if isinstance(option, TableOption):
        return entry_takes(option.entry)
    if option.is_flag:
        return ""
    kind = option.type
    if isinstance(kind, click.Choice):
        return ", ".join(f"`{choice}`" for choice in kind.choices)
    if isinstance(kind, (click.IntRange, click.FloatRange)):
        number = "a whole number" if isinstance(kind, click.IntRange) else "a number"
        return f"{number} {'>' if kind.min_open else '>='} {kind.min}"
    names = {"text": "a text", "path": "a path", "integer": "a whole number", "float": "a number"}
    return f"`{option.metavar}`" if option.metavar else names.get(kind.name, kind.name)


def combinations_page() -> Iterator[str]:
    yield "# What goes together"
    yield (
        f"Every pair of these settings, on {combinations.RANKS} GPUs, asked of the checks that finetune makes before a "
        "start. A refusal names the nearest that can be had. What was measured of the others: "
        "[parallelism](parallelism.md)."
    )
    yield ""
    yield from table(
        ("", "settings"),
        ((name, ", ".join(f"`{one}`" for one in axis)) for name, axis in combinations.AXES.items()),
    )
    refused = [pair for pair in combinations.pairs() if pair.problems]
    yield ""
    yield (
        f"{len(combinations.pairs()) - len(refused)} of {len(combinations.pairs())} pairs are trained. "
        "These are refused:"
    )
    yield ""
    rows = (
        (f"`{pair.one}`", f"`{pair.other}`", cell(one.what), cell(one.hint))
        for pair in refused
        for one in pair.problems
    )
    yield from table(("one", "the other", "why", "instead"), rows)
    yield ""
    yield "## Drawn, and trained"
    yield ""
    yield (
        f"{combinations.MODEL} took two steps with each of these pairs, drawn by `python bench/pairs.py --write`, on "
        "CPU ranks (2, or the number at the end). Trained: losses are those of one process with the same settings "
        "(within 5e-5; bf16: 2e-2), a setting that changes losses changes them, and what each leaves behind is there."
    )
    yield ""
    yield from table(
        ("pair", "what came of it"),
        ((f"`{line['pair']}`", cell(line["found"])) for line in combinations.tried()),
    )


def measured_page() -> Iterator[str]:
    """The index of the pages of measurements."""
    yield from measured.english()
    yield from table(["what", "where", "date"], measured.rows(""))


def chinese_measured_page() -> Iterator[str]:
    """The same index in Chinese."""
    yield from measured.chinese()
    yield from table(["内容", "在哪里测的", "日期"], measured.rows("_zh"))


MAKERS: dict[str, Callable[[], Iterable[str]]] = {
    "presets.md": presets_page,
    "rules.md": rules_page,
    "rules.zh.md": chinese_rules_page,
    "config-keys.md": keys_page,
    "combinations.md": combinations_page,
    "commands.md": commands_page,
    "options.md": options_page,
    "cluster-files.md": clusters_page,
    "launchers.md": launchers_page,
    "environment.md": environment_page,
    "planner-terms.md": terms_page,
    "gpus.md": gpus_page,
    "signatures.md": signatures_page,
    "versions.md": versions_page,
    "json.md": json_schemas.page,
    "measured.md": measured_page,
    "measured.zh.md": chinese_measured_page,
}


def page(name: str) -> str:
    """The text of a page."""
    first, *rest = MAKERS[name]()
    return "\n".join([first, "", NOTE, *rest]).rstrip("\n") + "\n"


def with_plans(text: str) -> str:
    """A page in which each plan below its command is what that command prints."""
    return SHOWN_PLAN.sub(lambda shown: shown[1] + planned(shown[2]), text)


@functools.cache
def planned(command: str) -> str:
    """The output of `dsrun plan ...` for chosen presets, without a user's own calibrations."""
    words = record.with_chosen_presets(shlex.split(command))
    with tempfile.TemporaryDirectory() as folder:
        done = CliRunner().invoke(cli, words, env={"XDG_CONFIG_HOME": folder})
    if done.exit_code not in (0, 1) or not done.stdout:  # 1: nothing fits
        raise RuntimeError(f"dsrun {command}: {done.output}")
    return record.with_others(done.stdout.strip() + "\n")


def contents() -> Iterator[tuple[Path, str]]:
    """Every page that is made, wholly or in part, with what it has to hold."""
    yield from ((PAGES / name, page(name)) for name in MAKERS)
    for name in FORMS:
        text = json.dumps(json_schemas.schema_of(name), indent=2, ensure_ascii=False)
        yield PAGES / "json" / f"{name}.schema.json", f"{text}\n"
    for path in (ROOT / name for name in SHOWN):
        yield path, with_plans(path.read_text(encoding="utf-8"))
    yield from migration.pages(ROOT)
    yield record.PICTURE, record.current()


def stale() -> list[str]:
    """The pages whose files are not what the code says, from the repository's root."""
    return [
        str(path.relative_to(ROOT))
        for path, text in contents()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        old = stale()
        for name in old:
            print(f"{name} is not current; run: python docs/generate.py", file=sys.stderr)  # noqa: T201
        return 1 if old else 0
    for path, text in contents():
        write_atomic(path, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
