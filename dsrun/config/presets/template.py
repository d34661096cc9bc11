"""templates/deepspeed.json.j2 and its parts: a merged preset and the options in, a ds_config out.

The nearest folder wins part by part, so a lab can replace one; what it replaces is there as "shipped/NAME".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dsrun import catalog
from dsrun.errors import DsrunError
from dsrun.files import read_text

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

MAIN = "deepspeed.json.j2"
LABEL = f"templates/{MAIN}"


def render(preset: Mapping[str, Any], options: Any, ranks: int) -> dict[str, Any]:
    """The ds_config. Raises DsrunError with the template's file and line for a fault in it.

    options: build.Options.
    ranks: data-parallel ranks.
    """
    from jinja2 import TemplateError, TemplateNotFound, TemplateSyntaxError

    environment = _environment(tuple(catalog.folders("templates")))
    try:
        text = environment.get_template(MAIN).render(preset=preset, options=options, ranks=ranks)
    except TemplateSyntaxError as error:
        raise DsrunError(str(error.message), where=f"{error.filename}:{error.lineno}") from error
    except TemplateNotFound as error:
        raise DsrunError(f"no template {error.name}", where=_place(error)) from error
    except (TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DsrunError(str(error), where=_place(error)) from error
    return _parse(text, str(environment.get_template(MAIN).filename))


def shipped() -> bool:
    """Whether the template is dsrun's own: no lab's folder replaces a part of it."""
    return catalog.folders("templates") == [catalog.shipped_root() / "templates"]


@lru_cache(maxsize=4)
def _environment(folders: tuple[Path, ...]) -> SandboxedEnvironment:
    """Templates are compiled once; one that changes on disk is noticed (jinja's auto_reload)."""
    from jinja2 import ChoiceLoader, FileSystemLoader, PrefixLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    shipped = FileSystemLoader(catalog.shipped_root() / "templates")
    environment = ImmutableSandboxedEnvironment(
        loader=ChoiceLoader([FileSystemLoader(folders), PrefixLoader({"shipped": shipped})]),
        undefined=StrictUndefined,
        autoescape=True,  # Marks what `tojson` gives, which _quoted asks for; nothing else may come through.
        finalize=_quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # A template is used a few times: folding constants would cost more than it saves.
    )
    environment.filters["tojson"] = _tojson
    return environment


def _tojson(value: Any) -> Any:
    """A value as JSON text; unlike jinja's own filter it keeps the order and names what is undefined."""
    from markupsafe import Markup

    def refuse(item: Any) -> NoReturn:
        str(item)  # Raises where it is undefined, and says what.
        raise TypeError(f"nothing for JSON: {item!r}")

    return Markup(json.dumps(value, ensure_ascii=False, allow_nan=False, default=refuse))  # noqa: S704


def _quoted(value: Any) -> Any:
    """Refuses what didn't go through `tojson`: a path with a quote in it would change the JSON."""
    from jinja2 import TemplateRuntimeError, Undefined

    # What is undefined says so itself, once it is used.
    if isinstance(value, Undefined) or hasattr(value, "__html__"):
        return value
    raise TemplateRuntimeError(f"a value goes out without `| tojson`: {value!r}")


def label(path: str) -> str:
    """The template that gives a key, for --explain: a lab's own part where it has one that writes the key."""
    shipped = catalog.shipped_root() / "templates"
    word = f'"{path.rpartition(".")[2]}"'
    for file in catalog.files("templates", ".j2").values():
        if not file.is_relative_to(shipped) and word in read_text(file):
            return str(file)
    return LABEL


def _place(error: BaseException) -> str:
    """The innermost template line of a traceback; jinja puts its own file and line numbers there."""
    import traceback

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(".j2")]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else LABEL


def _parse(text: str, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise DsrunError(f"writes {', '.join(twice)} twice", where=where)
        return dict(pairs)

    def refuse(name: str) -> NoReturn:
        raise DsrunError(f"writes {name}", where=where, hint="JSON has no such number.")

    try:
        config = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except ValueError as error:
        line = text.splitlines()[getattr(error, "lineno", 1) - 1].strip() if text.strip() else "(nothing)"
        raise DsrunError(f"gives no JSON: {error}", where=where, hint=f"That line: {line}") from error
    if not isinstance(config, dict):
        raise DsrunError(f"gives no JSON object: {text.strip()[:80]}", where=where)
    return config
