"""Pages from templates: every value that goes into one is escaped, and keys, tokens and passwords in it are hidden."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun import __version__
from dsrun.hiding import without_secrets
from dsrun.reports.sections import DATA_HEAD, RANK_HEAD

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent / "templates"
GENERATOR = f"dsrun {__version__}"
MARK = '<meta name="generator" content="dsrun '
"""By which a file is known to be a page of dsrun's."""


def render(name: str, **values: Any) -> str:
    """The page of a template."""
    shared = {"generator": GENERATOR, "data_head": DATA_HEAD, "rank_head": RANK_HEAD, "style": _style()}
    return _environment().get_template(name).render(**shared, **values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, Undefined
    from markupsafe import Markup

    def finalise(value: Any) -> Any:
        """Not what is a page's own already: markup, and the numbers that it counts."""
        if isinstance(value, (Markup, Undefined, int, float)):
            return value
        return _writable(without_secrets(str(value)))

    found = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, finalize=finalise, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    # What dsrun.reports.charts drew: matplotlib escapes its texts, and secrets are looked for in them, too.
    found.filters["made"] = Markup  # another template's output
    found.filters["drawn"] = lambda svg: Markup(_writable(without_secrets(svg)))  # noqa: S704
    return found


def _writable(text: str) -> str:
    """A text that UTF-8 can hold: names of files need not."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


@cache
def _style() -> Any:
    from markupsafe import Markup

    return Markup((FOLDER / "style.css").read_text(encoding="utf-8"))  # noqa: S704  (a file of dsrun's own)
