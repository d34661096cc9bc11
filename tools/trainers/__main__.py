"""`python -m tools.trainers NAME=PATH ...`: read trainers' arguments, and write dsrun/trainers/arguments.json.

PATH is a wheel, or the folder with the package in it (site-packages); nothing of it is run, its syntax is read. Of a
class of options each field with its default is taken, and those of the classes that it is put together from; of a
program that parses its arguments itself, what its parser declares; of torchtune, the keys that its recipes look up.
A trainer that is not named keeps its entry. `--check` writes nothing and fails where something would change.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[2] / "dsrun" / "trainers" / "arguments.json"
UNKNOWN = {"unknown": True}
"""The default of an argument that is no plain value."""


@dataclass(frozen=True)
class Trainer:
    """Where a package declares what it takes."""

    package: str
    roots: tuple[str, ...] = ()
    """Patterns of names of classes, whose fields are arguments."""
    files: str = ""
    """A pattern of the files in which such classes, parsers or look-ups stand."""
    parsed: bool = False
    """Whether these files declare arguments with add_argument."""
    looked_up: str = ""
    """A pattern of the name that a config has in these files, whose attributes are arguments."""
    base: str = ""
    """The trainer whose arguments it takes, too."""


TRAINERS = {
    "transformers": Trainer(
        "transformers", ("Seq2SeqTrainingArguments",), r"transformers/training_args(_seq2seq)?\.py"
    ),
    "llama-factory": Trainer(
        "llamafactory", (r"\w+Arguments",), r"llamafactory/hparams/\w+\.py", base="transformers"
    ),
    "axolotl": Trainer(
        "axolotl",
        ("AxolotlInputConfig", r"AxolotlConfig\w+", r"\w+Args", "SwanLabConfig", r"\w+MixIn", r"\w+edParameters"),
        r"axolotl/(utils/schemas/\w+|integrations/\w+/args)\.py",
    ),
    "ms-swift": Trainer(
        "swift", ("SftArguments", "RLHFArguments"), r"swift/(arguments|trainers|ray_utils|rlhf_trainers)/.*\.py",
        base="transformers",
    ),
    "trl": Trainer(
        "trl", ("SFTConfig", "ScriptArguments", "ModelConfig", "DatasetMixtureConfig"), r"trl/(trainer|scripts)/.*\.py",
        base="transformers",
    ),
    "torchtune": Trainer("torchtune", files=r"recipes/(full|lora|qat)\w*\.py", looked_up=r"cfg|_cfg"),
    "accelerate": Trainer("accelerate", files=r"accelerate/commands/launch\.py", parsed=True),
    "torchrun": Trainer("torch", files=r"torch/distributed/run\.py", parsed=True),
    "deepspeed": Trainer("deepspeed", files=r"deepspeed/launcher/runner\.py", parsed=True),
}  # fmt: skip


def main(words: list[str]) -> int:
    """Write the data, or compare them."""
    check, named = "--check" in words, [word for word in words if word != "--check"]
    before: dict[str, Any] = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    after = dict(before)
    for word in named:
        name, _, place = word.partition("=")
        trainer = TRAINERS[name]
        texts = dict(_texts(Path(place), trainer.files))
        arguments = _arguments(trainer, {path: ast.parse(text) for path, text in texts.items()})
        after[name] = {
            "version": _version(Path(place), trainer.package),
            "base": trainer.base,
            "arguments": arguments,
        }
        print(f"{name} {after[name]['version']}: {len(arguments)} arguments in {len(texts)} files")
    text = json.dumps(dict(sorted(after.items())), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    if check:
        return int(before != json.loads(text))
    TARGET.write_text(text, encoding="utf-8")
    return 0


def _texts(place: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """The files whose path in the package fits, with their texts."""
    if place.is_dir():
        top = re.split(r"[/(]", pattern)[0]
        for path in sorted((place / top).rglob("*.py")):
            if re.fullmatch(pattern, inside := path.relative_to(place).as_posix()):
                yield inside, path.read_text(encoding="utf-8")
        return
    with zipfile.ZipFile(place) as wheel:
        for name in sorted(wheel.namelist()):
            if re.fullmatch(pattern, name):
                yield name, wheel.read(name).decode()


def _version(place: Path, package: str) -> str:
    if place.is_dir():
        return next(place.glob(f"{package}-*.dist-info")).name.split("-")[1]
    return place.name.split("-")[1]


def _arguments(trainer: Trainer, files: Mapping[str, ast.Module]) -> dict[str, Any]:
    nodes = [node for tree in files.values() for node in ast.walk(tree)]
    if trainer.parsed:
        return dict(sorted(_declared(nodes)))
    if trainer.looked_up:
        return dict.fromkeys(sorted(_looked_up(nodes, trainer.looked_up)), UNKNOWN)
    classes: dict[str, ast.ClassDef] = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    names = [name for name in classes if any(re.fullmatch(root, name) for root in trainer.roots)]
    found: dict[str, Any] = {}
    for name in names:
        found |= _fields(name, classes)
    return dict(sorted(found.items()))


def _fields(name: str, classes: Mapping[str, ast.ClassDef]) -> dict[str, Any]:
    """The fields of a class and of all that it is put together from, the nearest default of each."""
    if name not in classes:
        return {}
    found: dict[str, Any] = {}
    for base in reversed(classes[name].bases):
        inner = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        found |= _fields(inner, classes) if inner != name else {}
    for node in classes[name].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if not node.target.id.startswith("_") and "ClassVar" not in ast.unparse(node.annotation):
            found[node.target.id] = _default(node.value)
            found |= dict.fromkeys(_aliases(node.value), UNKNOWN)
    return found


def _default(value: ast.expr | None) -> Any:
    """A field's default: a plain value; of field(...) and Field(...) what they say."""
    if isinstance(value, ast.Call):
        given = {word.arg: word.value for word in value.keywords}
        inner = given.get("default", value.args[0] if value.args else None)
        return _default(inner) if inner is not None else UNKNOWN
    try:
        plain = ast.literal_eval(value) if value is not None else UNKNOWN
        json.dumps(plain)
    except (ValueError, TypeError):
        return UNKNOWN
    return UNKNOWN if plain is ... else plain


def _aliases(value: ast.expr | None) -> Iterator[str]:
    """Other names of a field: validation_alias="..." or AliasChoices("a", "b")."""
    if isinstance(value, ast.Call):
        for word in value.keywords:
            if word.arg in ("alias", "validation_alias"):
                for node in ast.walk(word.value):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        yield node.value


def _declared(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Options that a parser declares, without their dashes."""
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            given = {word.arg: word.value for word in node.keywords}
            default = _default(given.get("default")) if "default" in given else None
            flag = ast.literal_eval(given["action"]) if isinstance(given.get("action"), ast.Constant) else ""
            for arg in node.args:
                if isinstance(arg, ast.Constant) and str(arg.value).startswith("-"):
                    yield (
                        str(arg.value).lstrip("-").replace("-", "_"),
                        False if flag == "store_true" else default,
                    )


def _looked_up(nodes: Iterable[ast.AST], name: str) -> set[str]:
    """Keys of a config: config.key, and config.get("key")."""

    def is_config(node: ast.AST) -> bool:
        return re.fullmatch(name, getattr(node, "attr", "") or getattr(node, "id", "")) is not None

    found = set()
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_config(node.func.value):
            if node.func.attr == "get" and node.args and isinstance(node.args[0], ast.Constant):
                found.add(str(node.args[0].value))
        elif isinstance(node, ast.Attribute) and is_config(node.value) and node.attr != "get":
            found.add(node.attr)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
