"""The command line: one module a command, found by looking in this folder.

A command module parses, calls and prints; it knows click and rich and nothing of rules. It is imported only when its
command is asked for, and imports heavy things inside functions. `dsrun --help` reads the first line of each module:
its command, the group of commands that it belongs to, and what it does.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import keyword
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from dsrun import __version__
from dsrun.errors import DsrunError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from dsrun.errors import Problem

FOLDER = Path(__file__).parent
GROUPS = ("configs", "jobs", "runs", "machines")
ABOUT = re.compile(rf'"""`dsrun [\w-]+` \(({"|".join(GROUPS)})\): (.+?)\.(?:"""|$)')
"""The first line of a command's module: its group, its short help."""
DISK_FULL = (
    "a disk is full\n"
    "  Make room, or name another place for stdout, the cache (DSRUN_CACHE) or the run's folder."
)
FOLDER_REMOVED = "the folder that you are in has been removed, or replaced\n  Go into it again: cd ."
COMPLETE = "_DSRUN_COMPLETE"
"""The variable by which a shell asks what completes a line: `dsrun completion`."""


class Commands(click.Group):
    """A group whose commands are the modules of this package; each holds `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(path.stem.rstrip("_") for path in FOLDER.glob("[!_]*.py"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{module_of(cmd_name)}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click's, with the nearest name for one that is no command."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from dsrun.catalog import suggestion

            near = suggestion(args[0], self.list_commands(ctx), "")
            raise click.UsageError(f"No such command {args[0]!r}. {near}".strip(), ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands in groups, with their short help; no module is imported for it."""
        abouts = {name: _about(name) for name in self.list_commands(ctx)}
        for group in GROUPS:
            with formatter.section(group.capitalize()):
                formatter.write_dl([(name, about[2]) for name, about in abouts.items() if about[1] == group])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Click's, which imports every command for its short help."""
        from click.shell_completion import CompletionItem

        if not incomplete.startswith("-"):
            names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
            return [CompletionItem(name, help=_about(name)[2]) for name in names]
        return super().shell_complete(ctx, incomplete)


def module_of(command: str) -> str:
    """The module of a command; one that is named as a word of Python's ends in an underscore: import_.py."""
    return f"{command}_" if keyword.iskeyword(command) else command


def _about(name: str) -> re.Match[str]:
    """The match of the first line of a command's module."""
    with (FOLDER / f"{module_of(name)}.py").open(encoding="utf-8") as file:
        line = file.readline().rstrip("\n")
    if (about := ABOUT.match(line)) is None:
        raise ValueError(
            f"{name}.py begins with {line!r}; expected its group and short help: {ABOUT.pattern}"
        )
    return about


@click.command(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="dsrun")
def cli() -> None:
    """DeepSpeed configs that are right, and jobs that run.

    \b
    dsrun preset zero2-offload --gpus 2      print a deepspeed.json
    dsrun finetune chatglm2-tiny --gpus 2    train the model that dsrun brings
    """


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Exit codes: 0 done, 1 the input or the run is bad, 2 wrong usage, 3 an internal error, 75 the time limit is
    near, 129 the terminal was closed, 130 Ctrl-C, 143 SIGTERM; a training job's own exit code is passed
    through.
    """
    _collect_seldom()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal's encoding lacks is shown as its code, and raises nothing.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(
            args=args,
            prog_name="dsrun",
            complete_var=COMPLETE,
            standalone_mode=False,
            color=False if os.environ.get("NO_COLOR") else None,
        )
    except click.exceptions.Abort:
        code = _say("interrupted", 130)
    except click.ClickException as error:
        if isinstance(error, click.UsageError) and error.ctx is None:
            error.ctx = _context_of(sys.argv[1:] if args is None else args)
        error.show()
        code = error.exit_code
    except DsrunError as error:
        for problem in error.problems:
            click.echo(_text_of(problem), err=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = _say("interrupted", 130)
    except BrokenPipeError:  # the reader went away (`dsrun ... | head`)
        code = 1
    except Exception as error:
        known = _known(error)
        code = _say(known, 1) if known else _unexpected(error)
    # Here and not at Python's exit, where a full disk behind stdout would end in a traceback.
    _flush_or_drop()
    sys.exit(code if isinstance(code, int) else 0)


def _flush_or_drop() -> None:
    """Drop what stdout doesn't take. Python would try once more at its exit, print a traceback and end with 120."""
    try:
        if sys.stdout is not None:  # None: the shell has closed it
            sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _collect_seldom() -> None:
    """A short command makes much and drops little: looking for cycles among it, 70 times and once more at the exit, is
    an eighth of its time."""
    gc.set_threshold(50_000, 20, 100)
    atexit.register(gc.freeze)


def _text_of(problem: Problem) -> str:
    """A problem's text; on a terminal its first line is folded at words. The hint may be a command, to be copied
    whole."""
    from dataclasses import replace

    from dsrun.host.hiding import without_secrets

    # Each part by itself: an option in `where` isn't a name whose value `what` would be.
    what, where, hint = map(without_secrets, (problem.what, problem.where, problem.hint))
    text = f"dsrun: {replace(problem, what=what, where=where, hint=hint)}"
    if "\n" in problem.what:
        return text
    from dsrun.cli.output.columns import folded, screen_width

    first, *rest = text.split("\n")
    return "\n".join([folded(first, screen_width(err=True), 4), *rest])


def _context_of(words: Sequence[str]) -> click.Context:
    """The command that some words name, for its usage line: click's parser raises without it."""
    context = click.Context(cli, info_name="dsrun")
    for word in words:
        command = context.command
        below = command.get_command(context, word) if isinstance(command, click.Group) else None
        if below is None:
            break
        context = click.Context(below, info_name=word, parent=context)
    return context


def _known(error: Exception) -> str | None:
    """The message for faults that are no bug, wherever they strike: a full disk, a folder removed under a shell, a
    package that is not installed."""
    from dsrun.files import is_full

    if isinstance(error, ModuleNotFoundError) and (missing := _missing(error)):
        return missing
    if is_full(error):
        return DISK_FULL
    try:
        os.getcwd()  # noqa: PTH109 - what fails is wanted
    except FileNotFoundError:
        return FOLDER_REMOVED
    return None


OWN_PACKAGES = {
    "attr": "attrs", "jinja2": "jinja2", "jsonschema": "jsonschema",
    "jsonschema_specifications": "jsonschema-specifications", "markupsafe": "markupsafe", "psutil": "psutil",
    "pynvml": "nvidia-ml-py", "referencing": "referencing", "rich": "rich", "rpds": "rpds-py", "tomli": "tomli",
    "yaml": "pyyaml",
}  # fmt: skip
"""Names by which dsrun's requirements and theirs are imported, and installed. Without click nothing gets here."""


def _missing(error: ModuleNotFoundError) -> str | None:
    """The message where one of dsrun's own requirements is not installed: pip with --no-deps leaves it so."""
    package = OWN_PACKAGES.get((error.name or "").partition(".")[0])
    if package is None:
        return None
    return (
        f"{package} is not installed in {sys.prefix}, and dsrun needs it\n"
        f"  {sys.executable} -m pip install {package}"
    )


def _say(text: str, code: int) -> int:
    click.echo(f"dsrun: {text}", err=True)
    return code


def _unexpected(error: Exception) -> int:
    """An internal error: the traceback goes to a file, whose path the user gets."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile(
        "w", prefix="dsrun-traceback-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write(f"dsrun {__version__}, Python {sys.version}\n{sys.argv}\n\n")
        file.writelines(traceback.format_exception(error))
    return _say(
        f"internal error (bug in dsrun): {type(error).__name__}: {error}\n"
        f"  The full traceback is in {file.name}; please report it.",
        3,
    )
