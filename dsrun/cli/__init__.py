"""The command line: one module a command, found by looking in this folder.

A command module parses, calls and prints; it knows click and rich and nothing of rules. Modules are imported
only when their command (or the list of commands) is asked for, and import heavy things inside functions.
"""

from __future__ import annotations

import importlib
import io
import pkgutil
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from dsrun import __version__
from dsrun.errors import DsrunError


class Commands(click.Group):
    """A group whose commands are the modules of this package; each holds `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name[0] != "_")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return command


@click.command(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="dsrun")
def cli() -> None:
    """DeepSpeed configs that are right, and jobs that run.

    \b
    dsrun preset zero2-offload --gpus 2      print a deepspeed.json
    dsrun finetune chatglm2-tiny --gpus 2    train the tiny model that ships with dsrun
    """


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Exit codes: 0 done, 1 the input or the run is bad, 2 wrong usage, 3 a fault of dsrun's own, 75 the time limit is
    near, 130 Ctrl-C, 143 SIGTERM; a training job's own exit
    code is passed through.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal's encoding lacks is shown as its code, and stops nothing.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(args=args, prog_name="dsrun", standalone_mode=False)
    except click.exceptions.Abort:
        code = _say("interrupted", 130)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except DsrunError as error:
        for problem in error.problems:
            click.echo(f"dsrun: {problem}", err=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = _say("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()  # The reader went away (`dsrun ... | head`): nothing is left to say to it.
        code = 1
    except Exception as error:
        code = _unexpected(error)
    sys.exit(code if isinstance(code, int) else 0)


def _say(text: str, code: int) -> int:
    click.echo(f"dsrun: {text}", err=True)
    return code


def _unexpected(error: Exception) -> int:
    """A fault of dsrun's own: the traceback goes to a file, its place to the user."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile(
        "w", prefix="dsrun-traceback-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write(f"dsrun {__version__}, Python {sys.version}\n{sys.argv}\n\n")
        file.writelines(traceback.format_exception(error))
    return _say(
        f"a fault in dsrun itself: {type(error).__name__}: {error}\n"
        f"  The full traceback is in {file.name}; please report it.",
        3,
    )
