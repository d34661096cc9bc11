"""Make the reference pages that follow from the code: presets, rules, config keys, commands, clusters' files ...

    python docs/generate.py            write them into docs/reference/
    python docs/generate.py --check    exit 1 and name the pages that are not current

Needs only what `dsrun` itself needs; neither torch nor DeepSpeed is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.pop("DSRUN_PATH", None)  # The pages describe what ships, not the writer's own folders.

from dsrun.catalog import files  # noqa: E402
from dsrun.cli import cli  # noqa: E402
from dsrun.config import preset, rules, schema, tree  # noqa: E402
from dsrun.config.rules.frame import EFFECTS  # noqa: E402
from dsrun.files import write_atomic  # noqa: E402
from dsrun.jobs import sites, travel  # noqa: E402
from dsrun.jobs.launchers.kubernetes import PodSpec  # noqa: E402
from dsrun.planner import gpus, terms  # noqa: E402

PAGES = ROOT / "docs" / "reference"
EXAMPLES = 2
"""How many wrong examples of a rule its page shows; the others are for the tests."""
SITE_KEYS = {
    "description": "a line for people",
    "launcher": "how jobs start there",
    "hosts": "the machines and their GPUs, where there is no queue",
    "hostfile": "the same in a file; its path counts from the cluster's file",
    "interface": "what NCCL and Gloo talk through: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
    "partition": "Slurm's partition; `--partition` comes before it",
    "account": "the account that is charged; `--account` comes before it",
    "qos": "quality of service; `--qos` comes before it",
    "constraint": "features that the nodes must have",
    "reservation": "a reservation to use",
    "time_limit_min": "the time limit where nobody says `--time`",
    "signal_s": "how long before the time limit dsrun is told; without it 300, or a quarter of a short job's time",
    "requeue": "whether the job goes back into the queue then",
    "gpus_per_node": "GPUs of each node; `--gpus-per-node` comes before it",
    "gres": "how sbatch is asked for GPUs; `{gpus}` becomes their number",
    "cpus_per_node": "cores of each node",
    "memory_gib": "memory of each node",
    "exclusive": "the whole node, even where fewer GPUs are asked for",
    "modules": "what `module load` loads, in this order",
    "setup": "lines of shell before dsrun, as they stand here",
    "container": "words in front of Python, for jobs on one node",
    "python": "the Python that has dsrun; without it the one that `dsrun submit` runs with, in a container `python3`",
    "environment": "variables that every rank gets; no secrets",
    "kubernetes": "what a pod is: see below",
}
"""What each key of a cluster's file does; a key without words here stops the page."""
POD_KEYS = {
    "image": "the container's image; it holds dsrun",
    "claim": "the PersistentVolumeClaim that all pods share (ReadWriteMany)",
    "mount_path": "where the pods see it; run folders, data and models lie below",
    "namespace": "where the job belongs",
    "cpu": "cores that are reserved",
    "memory_gib": "memory, reserved and the limit",
    "shm_gib": "size of /dev/shm, a part of the memory",
    "secret": "the Secret that holds tokens",
    "secret_variables": "those of its keys that become variables of the same name",
    "node_selector": "labels that a node must have",
    "tolerations": "taints of nodes that don't matter",
    "labels": "of the job, for queues such as Kueue",
    "image_pull_policy": "when the image is fetched",
    "image_pull_secret": "for a registry with a login",
    "gpu_resource": "what a GPU is called on the cluster",
    "grace_s": "seconds between SIGTERM and SIGKILL, enough for a checkpoint",
    "ttl_s": "seconds after its end until the job is deleted, with the pods' logs",
    "python": "the image's Python that has dsrun",
}
"""The same for the keys of [kubernetes]."""
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
        yield from preset_tables(chosen)


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
    """Every rule with its source, its examples and what it says of them."""
    found = rules.find_rules()
    yield "# Rules"
    yield ""
    yield f"What `dsrun validate` (and every command that makes a config) checks: {len(found)} rules. An *error* fails,"
    yield "or trains something else than the config says; a *warning* is without effect, deprecated or risky; a *note*"
    yield "is worth knowing. Each rule names the file of DeepSpeed (or of whoever reads the config) that it comes from."
    yield "`dsrun explain DS101` shows one in the terminal. In the examples, keys that begin with an underscore say"
    yield "what the config is judged for (`_for`, `_world_size`, `_trainer` ...); for 4 GPUs if nothing is said; batch"
    yield "sizes are added where they are missing."
    yield ""
    rows = [[f"[{rule.id}](#{rule.id.lower()})", rule.severity, rule.about] for rule in found]
    yield from table(["id", "severity", "about"], rows)
    for rule in found:
        yield f"## {rule.id}"
        yield ""
        yield f"**{rule.about}** ({rule.severity})"
        yield ""
        yield inspect.cleandoc(rule.source)
        yield ""
        if rule.effect:
            yield EFFECTS[rule.effect]
            yield ""
        for given in rule.bad[:EXAMPLES]:
            yield from bad_example(rule, given)
        yield from (f"- right: {code(given)}" for given in rule.good[:1])
        yield ""


def bad_example(rule: rules.Rule, given: Mapping[str, Any]) -> Iterator[str]:
    """A wrong example, and what is said of it."""
    yield f"- wrong: {code(given)}"
    for finding in rules.run(*rules.example(given)):
        if finding.rule == rule.id:
            path = f"$.{finding.path}" if finding.path else "$"
            yield f"  - `{path}`: {cell(finding.message)}. *{cell(finding.suggestion)}*"


def keys_page() -> Iterator[str]:
    """Every key of the schema, section by section."""
    found = schema.load().root
    yield "# Keys of deepspeed.json"
    yield ""
    yield f"Every key that DeepSpeed {found['x-deepspeed-version']} reads, from the schema that dsrun checks with."
    yield '*Default* is DeepSpeed\'s own, `-` where it has none. *auto*: HF Trainer fills in `"auto"` there.'
    yield "A key that begins with an underscore is a comment."
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
    yield "DeepSpeed stops at these, whatever their value."
    yield ""
    gone: Mapping[str, str] = found.get("x-removed", {})
    yield from table(["key", "instead"], ([f"`{key}`", cell(advice)] for key, advice in gone.items()))


def walk(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(dotted path, schema node) below a section; a section inside stands before its own keys."""
    for key, child in node.get("properties", {}).items():
        yield f"{prefix}.{key}", child
        yield from walk(child, f"{prefix}.{key}")


def keys_table(nodes: Iterable[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Path, type, default, auto, description."""
    rows = []
    for path, node in nodes:
        does = node.get("description", "")
        if alias := node.get("x-alias-of"):
            does = f"Another name of `{alias}`. {does}"
        default = code(node["default"]) if "default" in node else "-"
        takes = cell(schema.expected(dict(node)))
        rows.append([f"`{path}`", takes, default, "yes" if node.get("x-auto") else "", cell(does)])
    return table(["key", "takes", "default", "auto", "what it does"], rows)


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
        options = [option for option in command.params if isinstance(option, click.Option)]
        if options or not isinstance(command, click.Group):
            yield from table(["option", "takes", "what"], map(option_row, options))


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


def clusters_page() -> Iterator[str]:
    """Every key of a cluster's file."""
    yield "# A cluster's file"
    yield ""
    yield "What one cluster has differently from another: `launch/clusters/NAME.toml`, in the checkout or in a"
    yield "folder on `DSRUN_PATH`; `--cluster NAME` (or `DSRUN_CLUSTER`) uses it, and `--cluster ./FILE.toml` any"
    yield "file. What the command line says comes before it. Ready to copy, with comments:"
    yield ", ".join(f"[{name}](../../launch/clusters/{name}.toml)" for name in files(sites.KIND)) + "."
    yield ""
    yield "`setup` is shell, so such a file is trusted as a script is. Everything else is checked, and everything"
    yield "that is wrong is said at once. Nothing in it may be secret: it is written into run folders."
    yield ""
    yield from table(
        ["key", "takes", "default", "what it does"], site_rows(sites.KEYS, SITE_KEYS, sites.Site)
    )
    yield "## [kubernetes]"
    yield ""
    yield 'For `launcher = "kubernetes"`: [how to](../howto/kubernetes.md).'
    yield ""
    yield from table(["key", "takes", "default", "what it does"], site_rows(sites.PODS, POD_KEYS, PodSpec))


def site_rows(keys: Mapping[str, Any], words: Mapping[str, str], owner: type) -> Iterator[list[str]]:
    """Key, what it takes, the default that its owner has, what it does."""
    defaults = {field.name: field.default for field in dataclasses.fields(owner)}
    for name, key in keys.items():
        default = defaults.get(name, dataclasses.MISSING)
        usual = default is dataclasses.MISSING or default is None or default == ()
        yield [f"`{name}`", cell(key.words), "" if usual else code(default), cell(words[name])]


def environment_page() -> Iterator[str]:
    """What of the user's variables the ranks on other hosts get."""
    yield "# The environment that travels"
    yield ""
    yield "Ranks on other hosts get these of your variables, and what `--env NAME` or `--env NAME=VALUE` adds. What"
    yield "comes later wins: your environment, a cluster's file, `~/.deepspeed_env`, `.deepspeed_env` in this"
    yield "folder, `--env`. Values are passed as they are; no shell expands anything. `dsrun launch --dry-run` lists"
    yield "the names that go along."
    yield ""
    yield "## What begins with"
    yield ""
    yield named(travel.PREFIXES)
    yield ""
    yield "## These"
    yield ""
    yield named(travel.NAMES)
    yield ""
    yield "The folder of dsrun's own Python comes first on `PATH`, unless it is there."
    yield ""
    yield "## Never"
    yield ""
    yield "What belongs to one machine or one process: `*VISIBLE_DEVICES`, `MV2_COMM_WORLD_*`, `WANDB_SERVICE`. And"
    yield "what each rank gets from dsrun, whoever asks for it:"
    yield f"{named(travel.OURS)}."
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
    yield "A variable whose name holds a word like `TOKEN`, `SECRET`, `PASSWORD`, `API_KEY`, `CREDENTIALS` or `AUTH`,"
    yield "and a password inside a URL. They travel like the others, on no command line, and are in no log and no"
    yield f"file of the run folder that others can read; `--dry-run` shows `{travel.HIDDEN}`. A cluster's file, the"
    yield "script for Slurm and a manifest for Kubernetes never hold one."


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
    """What an option takes, in words; empty for a flag."""
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


MAKERS: dict[str, Callable[[], Iterable[str]]] = {
    "presets.md": presets_page,
    "rules.md": rules_page,
    "config-keys.md": keys_page,
    "commands.md": commands_page,
    "cluster-files.md": clusters_page,
    "environment.md": environment_page,
    "planner-terms.md": terms_page,
    "gpus.md": gpus_page,
}


def page(name: str) -> str:
    """The text of a page."""
    first, *rest = MAKERS[name]()
    return "\n".join([first, "", NOTE, *rest]).rstrip("\n") + "\n"


def stale() -> list[str]:
    """The pages whose files are not what the code says."""
    return [
        name
        for name in MAKERS
        if not (PAGES / name).is_file() or (PAGES / name).read_text(encoding="utf-8") != page(name)
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
            print(f"docs/reference/{name} is not current; run: python docs/generate.py", file=sys.stderr)  # noqa: T201
        return 1 if old else 0
    for name in MAKERS:
        write_atomic(PAGES / name, page(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
