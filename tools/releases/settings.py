"""What each release says about the settings of other libraries: TrainingArguments, plugins and strategies, as facts.

A setting is a field or a parameter of a class, "TrainingArguments.eval_strategy"; its facts are of the same kinds as
those of DeepSpeed's keys (config_facts.py): that it is there, its default, that it is deprecated, and what the class's
own functions refuse and warn of.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator

from dsrun.releases.packed import span
from tools.releases.config_facts import Fact, of_function
from tools.releases.fetch import Cache, Source

CLASSES: dict[str, dict[str, tuple[str, ...]]] = {
    "transformers": {
        "transformers/training_args.py": ("TrainingArguments",),
        "transformers/integrations/deepspeed.py": ("HfDeepSpeedConfig", "HfTrainerDeepSpeedConfig"),
        "transformers/deepspeed.py": ("HfDeepSpeedConfig", "HfTrainerDeepSpeedConfig"),
    },
    "accelerate": {
        "accelerate/utils/dataclasses.py": (
            "DeepSpeedPlugin", "FullyShardedDataParallelPlugin", "GradientAccumulationPlugin",
            "DataLoaderConfiguration", "DistributedDataParallelKwargs", "TorchDynamoPlugin",
        ),
        "accelerate/utils/deepspeed.py": ("HfDeepSpeedConfig",),
        "accelerate/commands/config/config_args.py": ("ClusterConfig",),
    },
    "lightning": {
        "lightning/pytorch/strategies/deepspeed.py": ("DeepSpeedStrategy",),
        "lightning/pytorch/strategies/fsdp.py": ("FSDPStrategy",),
        "lightning/fabric/strategies/deepspeed.py": ("DeepSpeedStrategy",),
        "lightning/fabric/strategies/fsdp.py": ("FSDPStrategy",),
    },
}  # fmt: skip
"""Package -> file -> the classes whose settings are kept."""
DEPRECATED = re.compile(r"\bdeprecated\b", re.IGNORECASE)
MOST_TEXT = 200
"""Characters of a default that is no constant."""


def facts(path: str, text: str, classes: tuple[str, ...]) -> list[Fact]:
    """The facts of a file of a release."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # written for a newer Python
        return []
    found: list[Fact] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            found += _of_class(node, path)
    return list(dict.fromkeys(found))


def _of_class(node: ast.ClassDef, path: str) -> Iterator[Fact]:
    # The same class stands in two packages of Lightning.
    holder = f"fabric.{node.name}" if "/fabric/" in path else node.name
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield from _setting(f"{holder}.{statement.target.id}", statement.value)
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if statement.name == "__init__":
                for name, default in _parameters(statement.args):
                    yield from _setting(f"{holder}.{name}", default)
            yield from of_function(statement, f"{path}:{node.name}.{statement.name}")


def _parameters(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr | None]]:
    plain = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults))
    pairs = [*zip(plain, [*missing, *arguments.defaults], strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return ((argument.arg, default) for argument, default in pairs if argument.arg != "self")


def _setting(place: str, value: ast.expr | None) -> Iterator[Fact]:
    """A field or parameter: there, with its default, and whether its own help calls it deprecated."""
    yield Fact("key", place)
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        if DEPRECATED.search(ast.unparse(keywords["metadata"]) if "metadata" in keywords else ""):
            yield Fact("deprecated", place)
        if factory := keywords.get("default_factory"):
            yield Fact("default", place, json.dumps(f"{ast.unparse(factory)[:MOST_TEXT]}()"))
        value = keywords.get("default")
    if value is not None:
        yield Fact("default", place, _text(value))


def _text(value: ast.expr) -> str:
    """A constant as JSON; anything else as it is written."""
    try:
        return json.dumps(ast.literal_eval(value))
    except (ValueError, TypeError, SyntaxError):
        return json.dumps(" ".join(ast.unparse(value).split())[:MOST_TEXT])


def settings_text(name: str, sources: list[Source], text_of: Callable[[str, str], str | None]) -> str:
    """Every fact with its span, a line each. text_of: release, path -> the file's text, None where there is none."""
    found: dict[Fact, int] = {}
    for number, source in enumerate(sources):
        for path, classes in CLASSES[name].items():
            if text := text_of(source.release, path):
                for fact in facts(path, text, classes):
                    found[fact] = found.get(fact, 0) | 1 << number
    every = (1 << len(sources)) - 1
    return "".join(f"{fact.line}\t{span(had, every)}\n" for fact, had in sorted(found.items()))


def from_cache(cache: Cache) -> Callable[[str, str], str | None]:
    """The files of a cache, by release and path."""

    def text_of(release: str, path: str) -> str | None:
        digest = cache.files(release).get(path)
        return cache.text(digest) if digest else None

    return text_of
