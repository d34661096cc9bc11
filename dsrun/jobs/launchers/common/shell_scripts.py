"""Shell scripts from the templates in launch/: values in, text out.

Every value goes through a filter: `sh` quotes a text (or a list of arguments) for the shell, `comment` keeps a text
on one line. A value that went through neither is refused, so that no user's text ever becomes shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from dsrun import catalog
from dsrun.errors import DsrunError

KIND = "launch"


def render(name: str, **values: Any) -> str:
    """The text of launch/NAME. Raises DsrunError, naming the template, for an undefined or an unquoted value."""
    from jinja2 import FileSystemLoader, StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from markupsafe import Markup

    def finalise(value: Any) -> Any:
        if isinstance(value, (Markup, StrictUndefined)):
            return value
        raise DsrunError(
            f"a value goes out unquoted: {value!r}", where=f"{KIND}/{name}", hint="Add | sh to it."
        )

    environment = ImmutableSandboxedEnvironment(
        loader=FileSystemLoader(catalog.folders(KIND)),
        undefined=StrictUndefined,
        autoescape=True,  # for Markup, which the filters give; nothing is HTML here
        finalize=finalise,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = lambda value: Markup(quoted(value))  # noqa: S704  (it is quoted for the shell)
    environment.filters["comment"] = lambda value: Markup(" ".join(str(value).split()))  # noqa: S704
    try:
        return environment.get_template(name).render(**values)
    except TemplateError as error:
        raise DsrunError(str(error), where=f"{KIND}/{name}") from error


def quoted(value: str | Sequence[str]) -> str:
    """A text as one shell word, a list as a command."""
    return shlex.quote(value) if isinstance(value, str) else shlex.join(value)
