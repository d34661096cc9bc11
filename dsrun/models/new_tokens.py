"""New special tokens of a fine-tune: which ones, and whether the model can get them. What adds them is in training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.files import read_json_object, read_text
from dsrun.job.job import ModelSpec
from dsrun.models import chatglm
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import LIST_SUFFIX, flag_of
from dsrun.options.table import TokenizerOptions

OPTION = flag_of(TokenizerOptions, "add_special_tokens")
TEMPLATE = flag_of(TokenizerOptions, "chat_template")
LONGEST = 100
"""Characters of a token: a longer one is no mark but a text."""


def asked_for(given: Iterable[str]) -> tuple[str, ...]:
    """The tokens that the option's values name, in their order.

    Raises DsrunError for what is no token, or comes twice.
    """
    tokens = [token for text in given for token in _named(text)]
    problems = [
        Problem(f"{token!r} can't be a token", OPTION, why) for token in tokens if (why := _wrong(token))
    ]
    problems += [
        Problem(f"names {token!r} {count} times", OPTION, "Once is enough.")
        for token, count in Counter(tokens).items()
        if count > 1
    ]
    raise_all(problems)
    return tuple(tokens)


def _named(text: str) -> list[str]:
    if not text.endswith(LIST_SUFFIX):
        return [token.strip() for token in text.split(",")]
    lines = read_text(Path(text).expanduser()).splitlines()
    if not (tokens := [line.strip() for line in lines if line.strip()]):
        raise DsrunError("holds no token", where=text, hint="One a line.")
    return tokens


def _wrong(token: str) -> str:
    if not token:
        return 'Names with commas between them: "<a>,<b>".'
    if len(token) > LONGEST:
        return f"It has {len(token)} characters; up to {LONGEST} make a token."
    return "" if token.isprintable() else "It holds a character that can't be seen."


def refusals(options: FinetuneOptions, model: ModelSpec, architecture: str | None) -> list[Problem]:
    """The reasons why a fine-tune can't have new tokens or another chat template. architecture: the config's
    model_type."""
    changes = {OPTION: bool(options.add_special_tokens), TEMPLATE: options.chat_template is not None}
    problems = []
    for flag in (flag for flag, given in changes.items() if given):
        if options.official:
            message = "has no place in --official, ChatGLM2's own recipe"
            problems.append(Problem(message, flag, "Leave one of the two out."))
        if chatglm.MODEL_TYPE in (model.source, architecture):
            message = (
                "is not for a model in ChatGLM's original format, whose tokenizer and prompts are part of it"
            )
            hint = "Train it once without; what comes of it, RUN/model, is in transformers' format and takes both."
            problems.append(Problem(message, flag, hint))
    if changes[OPTION] and options.method != "full":
        message = f"has no effect with --method {options.method}, which leaves the embeddings as they are"
        problems.append(Problem(message, OPTION, "Use --method full, by which new rows are trained."))
    return problems


def known_to(folder: Path, tokens: Sequence[str]) -> list[Problem]:
    """Tokens that a folder's tokenizer.json holds already; none where there is no such file."""
    path = folder / "tokenizer.json"
    if not tokens or not path.is_file():
        return []
    # As JSON and not by the tokenizer: importing transformers takes seconds, before a job that may be refused.
    table = read_json_object(path)
    added = table.get("added_tokens")
    known = (
        {token.get("content") for token in added if isinstance(token, dict)}
        if isinstance(added, list)
        else set()
    )
    if isinstance(vocabulary := table.get("model", {}).get("vocab"), dict):
        known |= vocabulary.keys()
    return already(known, tokens, str(path))


def already(known: Iterable[object], tokens: Sequence[str], where: str) -> list[Problem]:
    """The problem of tokens that are there before they are added."""
    if present := [token for token in tokens if token in set(known)]:
        return [Problem(f"holds {', '.join(present)} already", where, f"Leave it out of {OPTION}.")]
    return []
