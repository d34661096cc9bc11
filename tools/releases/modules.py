"""One release as modules: the names of its files with every link resolved to where it leads."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from tools.releases.names import LINK, Definition, FileNames

LAZY_FALLBACKS = {"TokenizerFast": "Tokenizer", "ImageProcessorFast": "ImageProcessor"}
"""Endings that transformers 5 answers with the name of another ending, where it has that one."""


@dataclass
class Module:
    """What can be imported from one module."""

    names: dict[str, list[Definition]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)
    dynamic: bool = False
    names_only: bool = False
    """What its classes and functions take was not read."""


def module_of(path: str) -> str:
    """The name that a file is imported by: "trl/trainer/__init__.py" is trl.trainer."""
    name = path.rpartition(".")[0].replace("/", ".")
    return name.removesuffix(".__init__")


class Release:
    """The files of one release, each with what stands in it."""

    def __init__(
        self,
        files: Mapping[str, FileNames],
        texts: Mapping[str, str] | None = None,
        resolved: dict[tuple[str, int], Any] | None = None,
    ) -> None:
        self.files: dict[str, list[tuple[str, FileNames]]] = {}
        for path, found in files.items():
            self.files.setdefault(module_of(path), []).append((path, found))
        self.folders = {
            module for module, both in self.files.items() for path, _ in both if "/__init__.py" in path
        }
        self.in_order = sorted(self.files)
        self.texts = texts or {}
        """Texts of files that more is read of."""
        self._names: dict[str, dict[str, list[Definition]]] = {}
        self._placed_before: dict[tuple[str, int], Any] = {} if resolved is None else resolved
        """(Module, id of its file's names) -> these and their resolved form: the same objects in the next release."""

    def modules(self) -> dict[str, Module]:
        """Every module, those that only lead to another among them."""
        found = {}
        for name, both in self.files.items():
            found[name] = Module(
                self.names(name),
                sorted({message for _, one in both for message in one.messages}),
                sorted({use for _, one in both for use in one.uses}),
                any(one.dynamic for _, one in both),
            )
        for old, target in self._aliases():
            if target in self.files and old not in self.files:
                found[old] = Module(links(target, self.names(target)))
                for name in [name for name in found[old].names if name.endswith("ImageProcessor")]:
                    found[old].names.setdefault(f"{name}Fast", found[old].names[name])
        return found

    def _aliases(self) -> Iterator[tuple[str, str]]:
        """Modules that lead to others: (path, where it leads)."""
        for name, both in self.files.items():
            for _, one in both:
                for pair in one.aliases.items():
                    old, target = (f"{name}.{each.removeprefix(f'{name}.')}" for each in pair)
                    yield old, target
        text = self.texts.get("transformers/__init__.py", "")
        for old, target in ALIAS.findall(text):
            yield f"transformers.{old}", f"transformers.{target}"
        if FAST_ALIASES.search(text):
            for name in self.in_order:
                if IMAGE_PROCESSORS.fullmatch(name):
                    yield f"{name}_fast", name

    def names(self, module: str) -> dict[str, list[Definition]]:
        """The names of a module; those of a lazy module are what its import structure says."""
        if module not in self._names:
            self._names[module] = {}  # modules that import everything of each other
            self._names[module] = self._resolved(module)
        return self._names[module]

    def _resolved(self, module: str) -> dict[str, list[Definition]]:
        found: dict[str, list[Definition]] = {}
        for path, one in self.files[module]:
            if one.lazy:
                found |= self._lazy(module, one)
                continue
            for star in (*one.stars, *MORE_STARS.get(module, ())):
                target = self.absolute(module, star)
                if target in self.files:
                    for name in self.exported(target):
                        found.setdefault(name, []).append(Definition(LINK, target=f"{target}.{name}"))
            placed = self._placed_names(module, one)
            if path.endswith(".pyi"):  # what a stub imports is for its own annotations
                placed = {name: both for name, both in placed.items() if "." not in one.names[name][0].target}
            found = {**found, **placed} if found else placed
        return found

    def _placed_names(self, module: str, one: FileNames) -> dict[str, list[Definition]]:
        key = (module, id(one))
        if key not in self._placed_before:
            placed = {
                name: [
                    placed
                    for each in definitions
                    if (placed := self._placed(module, each)).target != f"{module}.{name}"
                ]
                for name, definitions in one.names.items()
            }
            self._placed_before[key] = one, {name: both for name, both in placed.items() if both}
        names: dict[str, list[Definition]] = self._placed_before[key][1]
        return names

    def _placed(self, module: str, definition: Definition) -> Definition:
        """A definition with its link, and the bases of a class, as whole paths."""
        bases = [self._base(module, base) for base in definition.bases]
        return replace(
            definition, target=self._target(module, definition.target), bases=[base for base in bases if base]
        )

    def _target(self, module: str, target: str) -> str:
        if not target:
            return ""
        return self.absolute(module, target) if "." in target else f"{module}.{target}"

    def _base(self, module: str, base: str) -> str:
        """Where a base class comes from; empty for one that is not the package's or a link's."""
        first, dot, rest = base.partition(".")
        for _, one in self.files[module]:
            for definition in one.names.get(first, ()):
                target = definition.target
                return (self._target(module, target) if target else f"{module}.{first}") + dot + rest
        return ""

    def absolute(self, module: str, target: str) -> str:
        """A relative path as a whole one."""
        dots = len(target) - len(target.lstrip("."))
        if not dots:
            return target
        up = dots - (module in self.folders)
        parts = module.split(".")
        return ".".join([*parts[: len(parts) - up], *filter(None, [target[dots:]])])

    def exported(self, module: str) -> list[str]:
        """What `import *` takes."""
        names = self.names(module)
        told = [each for _, one in self.files[module] if one.exported is not None for each in one.exported]
        if told:
            return [name for name in told if name in names]
        return [name for name in names if not name.startswith("_")]

    # Lazy modules

    def _lazy(self, module: str, one: FileNames) -> dict[str, list[Definition]]:
        found: dict[str, list[Definition]] = {}
        structure = {f"{module}.{key}": names for key, names in one.structure.items()}
        for folder in one.folders:
            top = ".".join(filter(None, [module, folder.strip("/").replace("/", ".")]))
            for below in self.in_order[
                bisect_left(self.in_order, f"{top}.") : bisect_left(self.in_order, f"{top}/")
            ]:
                stem = below.rpartition(".")[2]
                if below not in self.folders and not stem.startswith(("convert_", "modular_")):
                    for _, each in self.files[below]:
                        structure.setdefault(below, []).extend((*each.required, *(each.exported or ())))
        for source, names in structure.items():
            known = self.names(source) if source in self.files else {}
            for name in names:
                # transformers 4 names a module's own objects that another module has; what is nowhere is an error.
                if name in known or source not in self.files:
                    link = Definition(LINK, target=f"{source}.{name}")
                    if link not in found.setdefault(name, []):
                        found[name].append(link)
        self._fallbacks(found)
        return found

    def _fallbacks(self, found: dict[str, list[Definition]]) -> None:
        """What transformers' lazy modules answer for names that they lack."""
        text = self.texts.get("transformers/utils/import_utils.py", "")
        for old, new in LAZY_FALLBACKS.items():
            if f'.endswith("{old}")' in text:
                for name in [name for name in found if name.endswith(new)]:
                    found.setdefault(name.removesuffix(new) + old, []).append(
                        Definition(LINK, target=found[name][0].target)
                    )
        if "SLOW_TO_FAST_CONVERTERS" in text:
            self._converted(found)

    def _converted(self, found: dict[str, list[Definition]]) -> None:
        """Tokenizers without a class of their own: that of another with the same converter stands for them."""
        converters = converters_in(self.texts.get("transformers/convert_slow_tokenizer.py", ""))
        for name, converter in converters.items():
            same = [other for other in converters if converters[other] == converter and other != name]
            for other in (f"{converter.replace('Converter', '')}Tokenizer", *same):
                if name not in found and other in found:
                    for old in (name, f"{name}Fast"):
                        found.setdefault(old, []).append(Definition(LINK, target=found[other][0].target))


MORE_STARS = {"torch": ("torch._C._VariableFunctions", "torch._C")}
"""Modules that take everything of others in a loop, as torch does of what is compiled."""

ALIAS = re.compile(r'_create_\w+_alias\(f"\{__name__\}\.(\w+)", "\.(\w+)"\)')
FAST_ALIASES = re.compile(r"\{_module\}_fast|_LEGACY_FAST_IMAGE_PROCESSOR_MODULE")
IMAGE_PROCESSORS = re.compile(r"transformers\.models\.\w+\.image_processing_(?!pil_)\w+(?<!_fast)")
"""How transformers 5 keeps paths of modules that it renamed."""

MORE_TEXTS = (
    "transformers/__init__.py",
    "transformers/utils/import_utils.py",
    "transformers/convert_slow_tokenizer.py",
)
"""Files of which more than their names is read."""


@cache
def converters_in(text: str) -> dict[str, str]:
    """Tokenizer -> its converter, of transformers' SLOW_TO_FAST_CONVERTERS."""
    for statement in ast.parse(text).body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id="SLOW_TO_FAST_CONVERTERS")], value=ast.Dict(keys=keys, values=values)
            ):
                pairs = zip(keys, values, strict=True)
                return {
                    str(key.value): ast.unparse(value)
                    for key, value in pairs
                    if isinstance(key, ast.Constant)
                }
    return {}


def links(target: str, names: Iterable[str]) -> dict[str, list[Definition]]:
    """A link to each name of a module."""
    return {name: [Definition(LINK, target=f"{target}.{name}")] for name in names}
