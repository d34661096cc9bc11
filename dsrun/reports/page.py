"""Pages from templates: every value that goes into one is escaped, and keys, tokens and passwords in it are hidden."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun import __version__
from dsrun.host.hiding import without_secrets
from dsrun.reports.sections import DATA_HEAD, RANK_HEAD

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent / "templates"
GENERATOR = f"dsrun {__version__}"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; img-src data:; base-uri 'none'"
"""What a page may load (Content-Security-Policy): nothing. Style may stand in the page: matplotlib writes it into each
stroke."""
REPEATED = 100
"""Characters of texts that may stand in many cells of a table: their shown form is cached."""
MARK = '<meta name="generator" content="dsrun '
"""The mark of a page of dsrun's in its file."""


def render(name: str, **values: Any) -> str:
    """The page of a template."""
    shared = {"generator": GENERATOR, "data_head": DATA_HEAD, "rank_head": RANK_HEAD, "style": _style()}
    return _environment().get_template(name).render(**shared, **values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, Undefined
    from markupsafe import Markup

    def finalise(value: Any) -> Any:
        """A value without secrets; markup and a page's own numbers have none."""
        if isinstance(value, (Markup, Undefined, int, float)):
            return value
        text = str(value)
        return _shown_often(text) if len(text) < REPEATED else _shown(text)

    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, finalize=finalise, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, auto_reload=False,
    )  # fmt: skip
    # What dsrun.reports.charts drew: matplotlib escapes its texts, and secrets are looked for in them, too.
    environment.filters["made"] = Markup  # another template's output
    # Line by line: a pattern holds up all other threads for as long as it looks.
    environment.filters["drawn"] = lambda svg: Markup("".join(map(_shown, svg.splitlines(keepends=True))))  # noqa: S704
    return environment


def _shown(text: str) -> str:
    """A text without secrets that UTF-8 can hold: names of files need not."""
    text = without_secrets(text)
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


_shown_often = lru_cache(maxsize=4096)(_shown)


@cache
def _style() -> Any:
    from markupsafe import Markup

    return Markup((FOLDER / "style.css").read_text(encoding="utf-8"))  # noqa: S704  (a file of dsrun's own)
