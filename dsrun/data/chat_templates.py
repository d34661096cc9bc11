"""Chat templates: Jinja that makes a prompt of messages, rendered in a sandbox as transformers does, but without it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError
from dsrun.files import read_json_object, read_text

CHAT_TEMPLATE = "chat-template"
"""The prompt format that stands for the tokenizer's chat template, or for a file's."""
OWN_FORMAT = "auto"
"""The prompt format of a folder where none is given: its tokenizer's chat template, if it has one."""
SAMPLE = "dsrun asks whether this text stands in the prompt"


def read_template(path: Path) -> str:
    """The text of a template's file. A question is rendered with it first.

    Raises DsrunError where the file can't be read, is no Jinja, or leaves the question out of the prompt.
    """
    if path.exists() and not path.is_file():
        raise DsrunError("is no file", where=str(path), hint="Name a file that holds the template.")
    text = read_text(path)
    try:
        prompt = rendered(text, [{"role": "user", "content": SAMPLE}])
    except Exception as error:  # a template may do anything
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line else str(path)
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        hint = "It gets messages (role, content), add_generation_prompt, bos_token and eos_token."
        raise DsrunError(f"can't be rendered as a chat template: {reason}", where=where, hint=hint) from error
    if SAMPLE not in prompt:
        hint = "As in {% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
        raise DsrunError(
            f"leaves the question out of the prompt, which is {prompt[:80]!r}", where=str(path), hint=hint
        )
    return text


def folder_template(folder: Path) -> str | None:
    """The chat template of a folder's tokenizer; None where there is none, or several."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file)
    config = folder / "tokenizer_config.json"
    template = read_json_object(config).get("chat_template") if config.is_file() else None
    return template if isinstance(template, str) else None


def rendered(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    answered: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The prompt that the messages become. answered: the last of them is the answer; else the prompt waits for one.

    It is what transformers renders (utils/chat_template_utils.py), without the tokens that begin and end a text.
    Raises whatever Jinja and the template raise.
    """
    values = {"messages": messages, "tools": tools, "bos_token": "", "eos_token": ""}
    return str(environment().from_string(template).render(values, add_generation_prompt=not answered))


def environment() -> Any:
    """Jinja as transformers sets it up for chat templates (utils/chat_template_utils.py)."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `generation`, which marks answers for transformers; it is rendered as its content."""

        tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    }
    return environment


def _json(value: Any, **options: Any) -> str:
    """The filter `tojson` as transformers has it: Jinja's own escapes some letters for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})
