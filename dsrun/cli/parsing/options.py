"""Click's options, made from the classes in dsrun/options: a command says which class, and gets what was given."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from dsrun.cli.parsing.completion import BY_OPTION
from dsrun.errors import DsrunError
from dsrun.options.declare import COUNT, Entry, entries
from dsrun.options.layers import Resolved, twice

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
ALL = "--help-all"
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
SHORT_FROM = 50
"""A command with more options shows the common ones, and the rest with --help-all."""


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in click's newer stubs only
    """A count such as 6.2e9, 6.2B or 6_243_584_000."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from dsrun.planner.units import count

        if isinstance(value, float):
            return value
        try:
            return count(value, "")
        except DsrunError as error:
            problem = error.problems[0]
            self.fail(f"{problem.what}. {problem.hint or ''}".strip(), param, ctx)


class FiniteRange(click.FloatRange):
    """A number within limits that is one: not nan, which is within none and beyond none."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from math import isfinite

        number = float(super().convert(value, param, ctx))
        if not isfinite(number):
            self.fail("is not a finite number.", param, ctx)
        return number


class WholeRange(click.IntRange):
    """A whole number within limits."""

    name = "whole number"


class TableOption(click.Option):
    """An option of the table."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        names = [entry.name, *entry.flags]
        is_flag = entry.kind is bool
        default = f"  [default: {entry.default_words}]" if entry.default_words else ""
        more: dict[str, Any] = {} if is_flag else {"type": _type(entry), "metavar": entry.option.metavar}
        if not is_flag and more["metavar"] is None and not entry.choices:
            more["metavar"] = METAVARS[entry.kind]
        super().__init__(
            names,
            help=entry.option.help + default,
            default=None,
            multiple=entry.repeated,
            is_flag=is_flag,
            shell_complete=BY_OPTION.get(entry.name),
            **more,
        )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Click's, without the limits of a number: one beyond them is answered with them."""
        record = super().get_help_record(ctx)
        return record and (record[0], re.sub(r"\s*\[[^]]*\bx[<>][^]]*\]$", "", record[1]))


def _type(entry: Entry) -> click.ParamType[Any] | type:  # type: ignore[type-arg,unused-ignore]
    option = entry.option
    if entry.choices:
        return click.Choice(entry.choices)
    if option.unit == COUNT:
        return Number()
    if entry.kind is Path:
        return click.Path(path_type=Path)
    if entry.kind is int:
        top = None if option.at_most is None else int(option.at_most)
        return WholeRange(None if option.at_least is None else int(option.at_least), top)
    if entry.kind is float:
        return FiniteRange(
            min=option.at_least if option.above is None else option.above,
            max=option.at_most if option.below is None else option.below,
            min_open=option.above is not None,
            max_open=option.below is not None,
        )
    return str


class TableCommand(click.Command):
    """A command whose options stand under the headings of their groups; --help shows the common ones."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click's; an option that is another trainer's is answered with dsrun's own."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from dsrun.trainers.other_names import ours, why_none

            flags = {param.name: param.opts[-1] for param in self.params if isinstance(param, TableOption)}
            if known := ours(error.option_name, flags.keys()):
                message = f"No such option {error.option_name!r}. Did you mean {flags[known]!r}?"
                raise click.UsageError(message, ctx) from error
            if hint := self.instead(error.option_name) or why_none(error.option_name):
                raise click.UsageError(f"No such option {error.option_name!r}. {hint}", ctx) from error
            raise

    def instead(self, option: str) -> str:  # noqa: ARG002
        """The advice for an option that this command lacks; empty where there is none."""
        return ""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Click's own list, divided into groups."""
        everything = bool(ctx.meta.get(ALL))
        groups: dict[str, list[tuple[str, str]]] = {}
        hidden = 0
        short = len(self.params) > SHORT_FROM
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is None or isinstance(param, click.Argument):
                continue
            if short and not everything and isinstance(param, TableOption) and not param.entry.option.common:
                hidden += 1
                continue
            group = param.entry.group if isinstance(param, TableOption) else "Help"
            groups.setdefault(group, []).append(row)
        groups["Help"] = groups.pop("Help", [])
        for title, rows in groups.items():
            with formatter.section(title if len(groups) > 1 else "Options"):
                formatter.write_dl(rows)
        if hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} more options: dsrun {ctx.info_name} {ALL}")


def _show_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def options_of(cls: type) -> Callable[[F], F]:
    """Give a command the options of a class, in the order of its groups; its function gets them as `given`."""

    def decorate(function: F) -> F:
        params = [TableOption(entry) for entry in entries(cls).values()]
        if len(params) > SHORT_FROM:
            click.option(
                ALL, is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help="Every option."
            )(function)
        known: list[click.Parameter] = function.__dict__.setdefault("__click_params__", [])
        known.extend(reversed(params))
        return function

    return decorate


def given(cls: type[T], values: Mapping[str, Any]) -> Resolved[T]:
    """The options of a class with what stands on the command line. values: click's, by name; taken out of them."""
    # None and () are click's values for options that are absent; False, 0 and "" were given.
    names = [name for name in values if name in entries(cls)]
    named = {name: values[name] for name in names if values[name] not in (None, ())}
    for problem in twice(entries(cls), named):
        raise click.UsageError(f"{problem.what}. {problem.hint}")
    return Resolved.by_user(cls, named)
