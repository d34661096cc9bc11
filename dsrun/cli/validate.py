"""`dsrun validate` (configs): everything that is wrong with deepspeed.json files."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.output.columns import echo_folded, folded, screen_width
from dsrun.cli.parsing.completion import files, gpus, models, rules
from dsrun.errors import DsrunError, collected, raise_all
from dsrun.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsrun.config.rules import Setting
    from dsrun.config.validation.sources import ConfigText
    from dsrun.config.validation.validate import RuleSelection, ValidationResult

COUNT = click.IntRange(min=1)
COLOURS = {"error": "red", "warning": "yellow", "note": "blue"}
SEVERITY = re.compile(rf"(\bDS\d{{3}}\s+)({'|'.join(COLOURS)})(?=:)")
"""A finding's rule, and its severity; a narrow terminal may have them on two lines."""
EXCERPT = re.compile(r"  +\d* *\|")
"""A line of the config, or what is marked below it."""
BESIDE_OPTION = "--with"


@click.command("validate")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", shell_complete=files)
@click.option(
    "--for",
    "target",
    type=click.Choice(["hf", "deepspeed", "accelerate", "lightning"]),
    help='Who reads it. Left out: hf where there is an "auto" (or --arg), else deepspeed.',
)
@click.option(
    "--world-size", type=COUNT, help="All GPUs of the job, or its data-parallel ranks under Megatron."
)
@click.option("--nodes", type=COUNT, help="Machines of the job.")
@click.option(
    "--gpu", metavar="NAME", shell_complete=gpus, help="Kind of GPU (v100-32g, a100-80g ...), or cpu."
)
@click.option(
    "--model", metavar="MODEL", shell_complete=models, help="A model's name, or its folder or config.json."
)
@click.option("--deepspeed-version", metavar="X.Y[.Z]", help="0.9 to 0.19.8; the installed one if left out.")
@click.option(
    "--with",
    "beside",
    metavar="NAME==VERSION,...",
    multiple=True,
    help="Judge these versions, too: deepspeed==0.19.4,transformers==5.1.",
)
@click.option(
    "--upgrade-to", metavar="X.Y[.Z]", help="Judge for that version, and offer what it takes to get there."
)
@click.option(
    "--trainer-args", metavar="FILE", help="TrainingArguments as JSON or YAML, for what must agree."
)
@click.option("--arg", "args", metavar="NAME=VALUE", multiple=True, help="One of them: learning_rate=1e-4.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "github", "sarif"]),
    default="text",
    show_default=True,
)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option(
    "--level",
    type=click.Choice(["error", "warning", "note"]),
    default="warning",
    show_default=True,
    help="The least severe findings to show. A rule that --select names by its whole id is always shown.",
)
@click.option("--strict", is_flag=True, help="Exit 1 on warnings too.")
@click.option(
    "--select",
    metavar="IDS",
    multiple=True,
    shell_complete=rules,
    help="Only these rules, or their beginnings: DS2,DS301.",
)
@click.option("--ignore", metavar="IDS", multiple=True, shell_complete=rules, help="All but these rules.")
@click.option(
    "--diff", "show", is_flag=True, help="Print what --fix would change as a patch; change nothing."
)
@click.option(
    "--fix",
    is_flag=True,
    help="Fix what has one right answer; for what isn't plain JSON, show a patch.",
)
@click.option("--unsafe-fixes", is_flag=True, help="With --fix or --diff: what may need a second look too.")
def command(files: tuple[str, ...], **given: Any) -> int:
    """Show everything that is wrong with deepspeed.json files, and what would be right.

    FILE is a deepspeed.json, an accelerate YAML (by its file name), a script, a folder, or - for JSON from a pipe. Of
    another trainer's YAML or a shell script the config that it names is checked; in scripts the configs that they hold
    (dicts of Python, here-documents of a shell), and of Python names that the installed or named versions of its
    packages don't have. Exit 1 if there is an error. A config's own key "_dsrun_ignore": ["DS203"] silences a rule.

    \b
    dsrun validate ds.json                         everything at once
    dsrun validate ds.json --world-size 8          with batch sizes for 8 GPUs
    dsrun validate ds.json --arg bf16=true         beside TrainingArguments
    dsrun validate ds.json --with deepspeed==0.18.1,numpy==2.1
    dsrun validate train.py --with transformers==5.1
    dsrun validate configs/ --format github --strict      in CI
    dsrun validate ds.json --level note            what is worth knowing too
    dsrun validate ds.json --fix                   fix what is safe to fix
    dsrun validate ds.hjson --diff | patch -p1     for Hjson, and for comments
    """
    from dsrun.config.validation import sources
    from dsrun.trainers.judging import judged, with_inner

    if given["unsafe_fixes"] and not (given["fix"] or given["show"]):
        raise click.UsageError("--unsafe-fixes needs --fix or --diff.")
    if given["as_json"]:
        if given["form"] != "text":
            raise click.UsageError("--json and --format exclude each other.")
        given["form"] = "json"
    if (given["args"] or given["trainer_args"]) and given["target"] not in (None, "hf"):
        raise click.UsageError("--arg and --trainer-args are for HF Trainer: use them with --for hf.")
    setting, selection = _setting(given), _selection(given)
    texts, problems = sources.gather(files)
    results: list[ValidationResult] = []
    for file in with_inner(texts, problems, lambda line: echo_folded(f"dsrun: {line}", 2, err=True)):
        of_file = judged(file, setting, selection, given["target"])
        inner = file.path is None and file.name != sources.PIPE
        if (given["fix"] or given["show"]) and not (file.is_yaml or file.is_script or inner):
            with collected(problems):
                of_file = [_fixed(file, result, setting, selection, given) for result in of_file]
        results += of_file
    _show(results, setting, selection, given)
    raise_all(problems)
    counted = ("error", "warning") if given["strict"] else ("error",)
    return int(any(result.count(severity) for result in results for severity in counted))


def _show(
    results: Sequence[ValidationResult], setting: Setting, selection: RuleSelection, given: dict[str, Any]
) -> None:
    """The findings go to stdout, unless a patch or the fixed text of a pipe is there."""
    from dsrun.config.validation import report

    piped = given["fix"] and any(result.name == "<stdin>" for result in results)
    is_text = given["form"] == "text"
    to_stderr = is_text if given["show"] else piped
    text = report.FORMATS[given["form"]](results)
    click.echo(_for_terminal(text) if is_text else text, nl=False, err=to_stderr)
    if is_text and results:
        summary = _summary(results, setting, selection, fixing=given["fix"] or given["show"])
        echo_folded(summary, 2, err=True)


def _for_terminal(text: str) -> str:
    """The report with its lines folded and its severities coloured, which click leaves out of files and pipes."""
    columns = screen_width()
    lines = (line if EXCERPT.match(line) else folded(line, columns, 4) for line in text.split("\n"))
    return SEVERITY.sub(lambda hit: hit[1] + click.style(hit[2], fg=COLOURS[hit[2]]), "\n".join(lines))


def _selection(given: dict[str, Any]) -> RuleSelection:
    from dsrun.config.rules import find_rules
    from dsrun.config.validation.validate import RuleSelection

    def ids(option: str) -> tuple[str, ...]:
        parts = [part.strip().upper() for text in given[option] for part in text.split(",")]
        for rule_id in filter(None, parts):
            if not any(rule.id.startswith(rule_id) for rule in find_rules()):
                raise DsrunError(
                    f"no rule begins with {rule_id}", where=f"--{option}", hint="`dsrun explain` lists them."
                )
        return tuple(filter(None, parts))

    return RuleSelection(ids("select"), ids("ignore"), given["level"])


def _setting(given: dict[str, Any]) -> Setting:
    import os

    from dsrun import versions
    from dsrun.config import trainer_args
    from dsrun.jobs.assembly.judging import setting_of

    setting, note = setting_of(
        os.environ,
        world_size=given["world_size"],
        nodes=given["nodes"],
        gpu=given["gpu"],
        model=given["model"],
        deepspeed_version=given["deepspeed_version"],
        upgrade_to=given["upgrade_to"],
        beside=versions.given(given["beside"], BESIDE_OPTION),
        trainer=trainer_args.given(given["trainer_args"], given["args"]),
    )
    if note:
        click.echo(f"dsrun: {note}", err=True)
    return setting


def _fixed(
    file: ConfigText,
    result: ValidationResult,
    setting: Setting,
    selection: RuleSelection,
    given: dict[str, Any],
) -> ValidationResult:
    """The result after its fixes: written to plain JSON with --fix, else shown as a patch."""
    import os

    from dsrun.config.validation import edits
    from dsrun.config.validation.validate import apply_fixes

    after = apply_fixes(result, setting, selection, unsafe=given["unsafe_fixes"])
    # The fixed text of a pipe goes to stdout, also where nothing was fixed: the next program in the pipe waits for it.
    piped = file.path is None and not given["show"]
    before, new = result.document, after.document
    if before is None or new is None or new.text == before.text:
        if piped:
            click.echo(file.data, nl=False)
        return result
    name = os.path.normpath(file.path or file.name)
    name = os.path.abspath(name) if name.startswith("..") else name  # noqa: PTH100 - links stay as they are
    patch = edits.patch(before.text, new.text, name).encode(errors="surrogateescape")
    click.echo(patch, nl=False, err=piped or given["form"] != "text")
    if given["show"]:
        return result
    if file.path is None:
        click.echo(new.text.encode(), nl=False)  # UTF-8, whatever the terminal's encoding is
    elif edits.in_place(before, new):
        write_atomic(file.path, new.text)
    else:
        how = "patch -p1 -d /" if name.startswith("/") else "patch -p1"
        note = (
            f"dsrun: {file.name} was not changed, as it isn't plain JSON, or would lose its comments. To apply the "
            f"patch above, run the same command with --diff in place of --fix, and `| {how}` after it."
        )
        echo_folded(note, 2, err=True)
        return result
    return after


def _summary(
    results: Sequence[ValidationResult], setting: Setting, selection: RuleSelection, *, fixing: bool
) -> str:
    from dsrun.config.schemas import schema
    from dsrun.config.validation import report
    from dsrun.config.validation.validate import count_fixes

    parts = f"dsrun: {report.summary(results)}"
    if len({result.name for result in results}) == 1:
        parts += f"; checked for {results[0].target}, DeepSpeed {schema.load(setting.version).release}"
    safe, unsafe = (0, 0) if fixing else count_fixes(results, selection)
    if safe:
        parts += f"; {safe} fixable with --fix"
    if unsafe:
        parts += f"; {unsafe}{' more' if safe else ''} fixable with --fix --unsafe-fixes"
    if hidden := sum(result.hidden for result in results):
        parts += f"; {hidden} less severe with --level note"
    return parts
