"""`dsrun completion` (machines): the script that makes a shell complete dsrun's commands, options and names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from dsrun.errors import DsrunError
from dsrun.files import explained, write_atomic

PLACES: dict[str, Callable[[Path, Path, Path], Path]] = {
    "bash": lambda _home, data, _config: data / "bash-completion" / "completions" / "dsrun",
    "zsh": lambda home, _data, _config: home / ".zfunc" / "_dsrun",
    "fish": lambda _home, _data, config: config / "fish" / "completions" / "dsrun.fish",
}
"""Shell -> where it looks for functions: from the home folder, XDG_DATA_HOME and XDG_CONFIG_HOME."""
AFTERWARDS = {
    "bash": "It is loaded in the next shell, where the package bash-completion is installed.",
    "zsh": "In ~/.zshrc, unless it is there: fpath+=(~/.zfunc); autoload -Uz compinit; compinit",
    "fish": "It is loaded in the next shell.",
}


@click.command("completion")
@click.argument("shell", type=click.Choice(list(PLACES)))
@click.option("--install", is_flag=True, help="Write it where the shell looks for it.")
def command(shell: str, install: bool) -> None:
    """Print the completion script of SHELL, or install it.

    \b
    dsrun completion bash --install
    eval "$(dsrun completion bash)"
    """
    text = script(shell)
    if not install:
        click.echo(text, nl=False)
        return
    path = place(shell)
    write(path, text)
    click.echo(f"completion: {path}")
    click.echo(f"  {AFTERWARDS[shell]}")


def script(shell: str) -> str:
    """The script: it asks `dsrun` itself what completes a line."""
    from click.shell_completion import get_completion_class

    from dsrun.cli import COMPLETE, cli

    made = get_completion_class(shell)
    assert made is not None  # noqa: S101 - click has all of PLACES
    # click's own `source` would start a bash to ask for its version, and print a warning into the script.
    maker = made(cli, {}, "dsrun", COMPLETE)
    return made.source_template % maker.source_vars()


def place(shell: str) -> Path:
    """The file that the shell loads by itself."""
    import os

    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    return PLACES[shell](home, data, Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config"))


def write(path: Path, text: str) -> None:
    """Put the script there; one that is there is replaced, and nothing that isn't dsrun's."""
    from dsrun.cli import COMPLETE

    with explained("can't be written", path, "Print it instead."):
        if path.exists() and COMPLETE not in path.read_text(encoding="utf-8", errors="replace"):
            raise DsrunError(
                "is there already, and isn't dsrun's completion",
                where=str(path),
                hint="Look at it; move it away, or put the script where you like: dsrun completion SHELL > FILE",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
