"""`dsrun bisect` (machines): which package broke it, and in which release."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.output.results import print_json
from dsrun.errors import DsrunError

if TYPE_CHECKING:
    from dsrun.bisect.probes import Probe, ProbeOutcome
    from dsrun.bisect.search import BisectResult, Versions

PIN = r"\s*([A-Za-z0-9_.-]+?)\s*==\s*(\d[\w.]*)\s*"


@click.command("bisect", context_settings={"ignore_unknown_options": True})
@click.option(
    "--good",
    metavar="NAME==VERSION,...",
    multiple=True,
    required=True,
    help="Versions with which it is right.",
)
@click.option(
    "--bad",
    metavar="NAME==VERSION,...",
    multiple=True,
    required=True,
    help="Versions with which it is wrong.",
)
@click.option("--validate", "config", metavar="FILE", help="Probe: `dsrun validate` finds no error in it.")
@click.option("--steps", is_flag=True, help="Probe: four steps of a tiny model on two CPU ranks.")
@click.option(
    "--says",
    metavar="TEXT",
    default="",
    help="It is wrong only where this is printed; else it can't be told.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=600,
    show_default=True,
    help="A probe that takes longer is wrong.",
)
@click.option(
    "--fresh",
    is_flag=True,
    help="Environments with all that the versions require, not beside this one's packages.",
)
@click.option(
    "--install", "more", metavar="PACKAGE", multiple=True, help="With --fresh: what else the probe needs."
)
@click.option(
    "--folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=Path("bisect"),
    show_default=True,
    help="Where versions and what the probes print are kept.",
)
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(command: tuple[str, ...], **given: Any) -> int:
    """Find out which package broke it, and in which release: right with --good, wrong with --bad.

    Packages that make no difference are left out first, then the releases of the others are halved. Each version is
    installed with uv or pip in its own folder, in front of what is installed here; --fresh makes whole environments.
    The probe is `dsrun validate`, four training steps, or your COMMAND: 0 is right, 125 can't tell, anything else is
    wrong; `python` in it is the environment's.

    \b
    dsrun bisect --good transformers==4.57.6 --bad transformers==5.1.0 -- python train.py
    dsrun bisect --good deepspeed==0.17.5,torch==2.9 --bad deepspeed==0.18.9,torch==2.13 --steps
    dsrun bisect --good deepspeed==0.18.9 --bad deepspeed==0.19.8 --validate ds.json
    """
    from dsrun.bisect import report
    from dsrun.bisect.environments import Beside, Fresh
    from dsrun.bisect.releases import releases_of
    from dsrun.bisect.search import Bisection

    good, bad = _pins(given["good"], "--good"), _pins(given["bad"], "--bad")
    if missing := sorted(bad.keys() ^ good.keys()):
        raise DsrunError(
            f"only one of --good and --bad names {', '.join(missing)}", hint="Name each in both."
        )
    folder: Path = given["folder"].expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    probe = _probe(command, folder, given)
    makes = Fresh(folder, given["more"]) if given["fresh"] else Beside(folder)
    outcomes: dict[tuple[tuple[str, str], ...], ProbeOutcome] = {}

    def ask(versions: Versions) -> str:
        outcome = outcomes[tuple(sorted(versions.items()))] = _asked(probe, makes, versions)
        return outcome.outcome

    answer = Bisection(good, bad, releases_of, ask).answer()
    wrong = {**good, **{culprit.package: culprit.first_wrong for culprit in answer.culprits}}
    last = outcomes.get(tuple(sorted(wrong.items())))
    said = last.said if last else ""
    entry = report.entry(answer, good, bad, said, _words(command, given))
    if as_json := given["as_json"]:
        print_json("bisect", _as_json(answer, said, entry))
    else:
        click.echo("\n".join([*report.told(answer, said), "", "For presets/versions/:", "", entry]))
    return 0 if as_json or answer.culprits else 1


def _asked(probe: Probe, makes: Any, versions: Versions) -> ProbeOutcome:
    """The outcome of some versions, told on stderr."""
    import os
    import sys

    from dsrun.bisect.environments import Environment
    from dsrun.bisect.probes import ProbeOutcome
    from dsrun.bisect.search import UNTOLD, in_words

    try:
        made = makes.made(versions) if probe.needs_environment else Environment(sys.executable, os.environ)
        outcome = probe.outcome(made, versions)
    except DsrunError as error:
        outcome = ProbeOutcome(UNTOLD, str(error).splitlines()[0])
    click.echo(
        f"{in_words(versions)}: {outcome.outcome}" + (f" ({outcome.said})" if outcome.said else ""), err=True
    )
    return outcome


def _probe(command: tuple[str, ...], folder: Path, given: dict[str, Any]) -> Probe:
    from dsrun.bisect.probes import CommandProbe, StepsProbe, ValidateProbe

    if (bool(command) + bool(given["config"]) + given["steps"]) != 1:
        raise click.UsageError("Name one probe: --validate FILE, --steps, or a COMMAND behind --.")
    seconds, says = given["seconds"], given["says"]
    if given["config"]:
        return ValidateProbe(given["config"], folder, seconds, says)
    return (
        StepsProbe(folder, seconds, says) if given["steps"] else CommandProbe(command, folder, seconds, says)
    )


def _pins(texts: tuple[str, ...], option: str) -> dict[str, str]:
    import re

    from dsrun.packages import plain

    pins: dict[str, str] = {}
    for text in (part for line in texts for part in line.split(",") if part.strip()):
        if (pin := re.fullmatch(PIN, text)) is None:
            raise DsrunError(f"{text.strip()!r} names no version", where=option, hint="Write NAME==VERSION.")
        pins[plain(pin[1])] = pin[2]
    return pins


def _words(command: tuple[str, ...], given: dict[str, Any]) -> str:
    if given["config"]:
        return f"dsrun validate {given['config']}"
    return "four steps of a tiny model on two CPU ranks" if given["steps"] else shlex.join(command)


def _as_json(answer: BisectResult, said: str, entry: str) -> dict[str, Any]:
    return {
        "culprits": [
            {
                "package": culprit.package,
                "last_right": culprit.last_right,
                "first_wrong": culprit.first_wrong,
                "untold": list(culprit.untold),
            }
            for culprit in answer.culprits
        ],
        "others": dict(answer.others),
        "tried": answer.tried,
        "says": said,
        "entry": entry,
    }
