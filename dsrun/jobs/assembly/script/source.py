"""How a user's script takes its DeepSpeed config, as far as its source shows. It is parsed, never imported.

The script and the modules beside it that it imports are read. There are three ways: DeepSpeed's own arguments
(deepspeed.add_config_arguments), Hugging Face's (HfArgumentParser with TrainingArguments), and an option of the
script's own. Calls are known by the last part of their names alone, wherever in a file they are.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError, Problem
from dsrun.files import explained

DEEPSPEED, HF, ACCELERATE = "deepspeed", "hf", "accelerate"
DEEPSPEEDS_OWN = ("--deepspeed", "--deepspeed_config")
HFS_OWN = ("--deepspeed",)
OPTION = re.compile(r"--?(?:deepspeed|ds)(?:[-_](?:config|json|cfg|file|path|name))*")
"""Usual names of an option for the config's file."""
ARGUMENTS = frozenset(("TrainingArguments", "Seq2SeqTrainingArguments"))
PARSERS = frozenset(("HfArgumentParser", "TrlParser"))
TRAINERS = frozenset(("Trainer", "Seq2SeqTrainer"))
DECLARING = ("add_argument", "option")
"""Calls that declare an option: argparse's and click's."""
FLAGS = frozenset(("store_true", "store_false", "store_const", "count", "help", "version"))
KEY = "deepspeed"
"""The field of TrainingArguments."""
DEVICES, LOCAL_RANK = "CUDA_VISIBLE_DEVICES", "--local_rank"
MOST_FILES = 300
MOST_BYTES = 2 << 20


@dataclass(frozen=True)
class ScriptSource:
    """Facts about a script from its source. Places are "FILE:LINE"; empty where there are none.

    reader: whose code reads the config. ways: the ways in which it takes the config's file, each the words before the
    file's name; a word that ends in "=" and the name are one. flags: config-like options without a value. own_config:
    the place where it makes the config itself. argv_file: it asks whether its first argument is a file of arguments.
    dotlist: beside such a file it takes NAME=VALUE words. plain_arguments: the parser fills Hugging Face's own class.
    """

    reader: str | None = None
    ways: tuple[tuple[str, ...], ...] = ()
    flags: frozenset[str] = frozenset()
    own_config: str = ""
    sets_devices: str = ""
    """Place where it sets CUDA_VISIBLE_DEVICES itself."""
    argv_file: bool = False
    dotlist: bool = False
    plain_arguments: bool = False
    imports: frozenset[str] | None = None
    """Top names of the packages that it imports; None where no source was read."""
    takes_local_rank: bool = False
    """Whether its parser knows --local_rank."""
    wants_deepspeed: bool = False
    """Whether it imports deepspeed, takes a config for it, or names one to the Trainer."""
    accelerator: str = ""
    """Place where it makes accelerate's Accelerator."""
    names_gloo: bool = False
    """Whether it hands accelerate the backend of CPU ranks: InitProcessGroupKwargs(backend=...)."""
    on_cpu: bool = False
    """Whether it asks for CPUs: Accelerator(cpu=...), TrainingArguments(use_cpu=...)."""


def of_script(script: Path) -> ScriptSource:
    """The facts about a script. Raises DsrunError where it is no Python that can be read."""
    return _read(script, script.resolve().parent)


def of_module(path: Path, root: Path) -> ScriptSource:
    """The facts about a module. root: the folder that its top package lies in."""
    return _read(path, path if _is_pythons_own(root) else root)


def own_files(path: Path, root: Path) -> Iterator[Path]:
    """A script and what it imports of the modules below a root. Raises DsrunError where it is no Python."""
    root = path if _is_pythons_own(root) else root
    return (file for file, _, _ in _with_imports(path, root))


def _is_pythons_own(root: Path) -> bool:
    """Whether a folder is Python's standard library. It knows nothing of DeepSpeed, so the hundreds of files that a
    module of it imports need not be read."""
    return (root / "os.py").is_file() and (root / "importlib" / "machinery.py").is_file()


def module_file(name: str, folders: Iterable[str]) -> tuple[Path, Path]:
    """The file that `python -m NAME` runs, and the folder that its top package lies in. Nothing is imported.

    Raises DsrunError where there is no such module, or none that can be run.
    """
    top, *rest = name.split(".")
    spec = PathFinder.find_spec(top, [*folders])
    if spec is None:
        raise DsrunError(f"there is no module {name!r}", where="--module", hint=_elsewhere(name))
    if not spec.submodule_search_locations:
        if rest or not spec.origin:
            fault = f"there is no module {name!r}: {top} is no package"
            raise DsrunError(fault, where="--module", hint=_elsewhere(name))
        return Path(spec.origin), Path(spec.origin).parent
    for folder in map(Path, spec.submodule_search_locations):
        place = folder.joinpath(*rest)
        for path in (place.with_suffix(".py") if rest else place / "__main__.py", place / "__main__.py"):
            if path.is_file():
                return path, folder.parent
    fault = f"there is no module {name!r} that can be run"
    raise DsrunError(fault, where="--module", hint=f"{top} is {spec.submodule_search_locations[0]}.")


def _elsewhere(name: str) -> str:
    if name.endswith(".py") or "/" in name:
        return (
            f"That is a file: leave out -m, or name the module: {name.removesuffix('.py').replace('/', '.')}"
        )
    return "It is looked for in this folder, in PYTHONPATH and where dsrun is installed."


def _read(path: Path, root: Path) -> ScriptSource:
    by_depth = [(depth, _File(file, tree).source()) for file, depth, tree in _with_imports(path, root)]
    sources = [source for _, source in by_depth]
    merged: dict[str, Any] = {}
    for field in fields(ScriptSource):
        values = [getattr(source, field.name) for source in sources]
        sets = [value for value in values if isinstance(value, frozenset)]
        merged[field.name] = frozenset().union(*sets) if sets else next(filter(None, values), field.default)
    # The script's own options count before those of a module that it imports, which may have a parser of its own.
    nearest = min((depth for depth, source in by_depth if source.ways), default=None)
    ways = dict.fromkeys(way for depth, source in by_depth if depth == nearest for way in source.ways)
    readers = {source.reader for source in sources}
    reader = next((name for name in (HF, ACCELERATE, DEEPSPEED) if name in readers), None)
    # Beside Hugging Face's arguments, a config in the source is another model's, a frozen one.
    own_config = "" if reader == HF else merged["own_config"]
    return ScriptSource(**{**merged, "ways": tuple(ways), "reader": reader, "own_config": own_config})


def _with_imports(path: Path, root: Path) -> Iterator[tuple[Path, int, ast.Module]]:
    """The script, and what it imports of the modules below root, however deep. Only the script has to be readable."""
    waiting, seen = [(path, 0)], {path}
    while waiting and len(seen) < MOST_FILES:
        file, depth = waiting.pop(0)
        try:
            tree = parsed(file)
        except DsrunError:
            if depth == 0:
                raise
            continue
        yield file, depth, tree
        for module in _imported(tree, file, root):
            if module not in seen:
                seen.add(module)
                waiting.append((module, depth + 1))


def parsed(path: Path) -> ast.Module:
    """A file's tree. Raises DsrunError where it is no Python."""
    with explained("can't be read", path):
        content = path.read_bytes()[:MOST_BYTES]
    try:
        return ast.parse(content, str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else str(path)
        fault = f"is not Python: {error.msg if isinstance(error, SyntaxError) else error}"
        raise DsrunError([Problem(fault, where)]) from error


def _imported(tree: ast.Module, file: Path, root: Path) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = root if not node.level else file.parents[min(node.level, len(file.parents)) - 1]
            parts = (node.module or "").split(".") if node.module else []
            yield from _files(base, parts)
            for alias in node.names:
                yield from _files(base, [*parts, alias.name])


def _files(base: Path, parts: list[str]) -> Iterator[Path]:
    """The files that importing a module runs: the packages on the way to it, and its own."""
    for place in range(1, len(parts) + 1):
        stem = base.joinpath(*parts[:place])
        for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
            if path.is_file():
                yield path
    if not parts and (base / "__init__.py").is_file():
        yield base / "__init__.py"


class _File:
    """One file of the script's source."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self.nodes = [*ast.walk(tree)]
        self._calls: dict[str, list[ast.Call]] = defaultdict(list)
        """Calls by the last part of the name that is called."""
        self._imports: list[tuple[str, str, str]] = []
        """Packages, each with the name that is imported from it and its name here, if there is one."""
        for node in self.nodes:
            if isinstance(node, ast.Call):
                self._calls[_name(node.func)].append(node)
            elif isinstance(node, ast.Import):
                self._imports += [(alias.name.split(".")[0], "", "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                package = node.module.split(".")[0]
                self._imports += [(package, alias.name, alias.asname or alias.name) for alias in node.names]

    def source(self) -> ScriptSource:
        """The facts about this file alone."""
        called, imports = set(self._calls), frozenset(package for package, _, _ in self._imports)
        parsers = self._calls_of(*PARSERS)
        takes_hfs = "TrlParser" in called or any(map(self._has_training_arguments, parsers))
        options, flags = self._options()
        ways: list[tuple[str, ...]] = [HFS_OWN] * takes_hfs
        if "add_config_arguments" in called:
            ways.append(DEEPSPEEDS_OWN)
            flags |= {"--deepspeed"}
        else:
            switch = ("--deepspeed",) if "--deepspeed" in flags else ()
            ways += [(*switch, option) for option in options]
        own_config, accelerator = self._own_config(), self._accelerator()
        # Hugging Face's classes first: their code calls deepspeed.initialize itself, and may use accelerate.
        reader = HF if takes_hfs or called & (ARGUMENTS | TRAINERS) else ACCELERATE if accelerator else None
        if reader is None and (ways or own_config or "initialize" in called):
            reader = DEEPSPEED
        return ScriptSource(
            reader=reader,
            ways=tuple(ways),
            flags=frozenset(flags),
            own_config=own_config,
            sets_devices=self._sets_devices(),
            argv_file=any(map(_is_first_argument, self._calls_of("endswith", "suffix"))),
            dotlist="from_cli" in called,
            plain_arguments=any(map(self._is_plain, parsers)),
            imports=imports,
            takes_local_rank=any(
                _text(word) == LOCAL_RANK for call in self._calls_of(*DECLARING) for word in call.args
            ),
            wants_deepspeed=reader == DEEPSPEED or DEEPSPEED in imports or self._passes(ARGUMENTS, KEY),
            accelerator=accelerator,
            names_gloo=self._passes(("InitProcessGroupKwargs",), "backend"),
            on_cpu=(bool(accelerator) and self._passes(("Accelerator",), "cpu"))
            or self._passes(ARGUMENTS, "use_cpu"),
        )

    def _calls_of(self, *names: str) -> list[ast.Call]:
        return [call for name in names for call in self._calls.get(name, ())]

    def _place(self, call: ast.Call | ast.Assign) -> str:
        return f"{self.path}:{call.lineno}"

    def _passes(self, names: Iterable[str], argument: str) -> bool:
        """Whether one of these calls has an argument that is not plainly nothing."""
        return any(_passed(call, argument) for call in self._calls_of(*names))

    def _accelerator(self) -> str:
        """The place where accelerate's Accelerator is made, which is not the only class of that name."""
        is_imported = any(package == ACCELERATE and name for package, name, _ in self._imports)
        for call in self._calls_of("Accelerator"):
            if is_imported or (isinstance(call.func, ast.Attribute) and _name(call.func.value) == ACCELERATE):
                return self._place(call)
        return ""

    def _has_training_arguments(self, parser: ast.Call) -> bool:
        """Whether a parser fills TrainingArguments too: it may be made of other classes alone."""
        classes = _classes(parser)
        return classes is None or bool(classes & ARGUMENTS or self._subclasses(classes))

    def _subclasses(self, classes: set[str]) -> set[str]:
        """The classes that may be TrainingArguments by another name: derived from them here, or imported."""
        derived = {node.name for node in self._class_definitions() if ARGUMENTS & set(map(_name, node.bases))}
        imported = {
            alias
            for package, name, alias in self._imports
            if package in ("transformers", "trl") and name.endswith(("TrainingArguments", "Config"))
        }
        return classes & (derived | imported)

    def _class_definitions(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    def _is_plain(self, parser: ast.Call) -> bool:
        classes = (_classes(parser) or set()) & ARGUMENTS
        return bool(classes) and classes.isdisjoint(node.name for node in self._class_definitions())

    def _options(self) -> tuple[list[str], set[str]]:
        """Options for a config's file, and of the same names those without a value."""
        options: list[str] = []
        flags: set[str] = set()
        for call in self._calls_of(*DECLARING):
            words = [word for arg in call.args if (word := _text(arg)) and OPTION.fullmatch(word)]
            given = {word.arg: word.value for word in call.keywords}
            if _constant(given.get("is_flag")) is True or _text(given.get("action")) in FLAGS:
                flags |= {*words}
            elif words:
                options.append(max(words, key=len))
        return options, flags

    def _own_config(self) -> str:
        """The place where deepspeed.initialize gets a config that no option names."""
        # `args.deepspeed_config`, or what was read from it.
        by_option = any(
            isinstance(node, ast.Attribute) and OPTION.fullmatch(f"--{node.attr}") for node in self.nodes
        )
        for call in self._calls_of("initialize"):
            # With arguments that hold a config, DeepSpeed refuses another one.
            has_arguments = bool(call.args) or _passed(call, "args")
            if (has_arguments or not by_option) and _passed(call, "config", "config_params"):
                return self._place(call)
        return ""

    def _sets_devices(self) -> str:
        """The place of os.environ[DEVICES] = ..., os.putenv(DEVICES, ...) or os.environ.update(...)."""
        for node in self.nodes:
            names: set[str | None] = set()
            if isinstance(node, ast.Assign):
                items = [target for target in node.targets if isinstance(target, ast.Subscript)]
                names = {_text(item.slice) for item in items if _name(item.value) == "environ"}
            elif isinstance(node, ast.Call) and _name(node.func) in ("putenv", "update"):
                keys = [key for arg in node.args if isinstance(arg, ast.Dict) for key in arg.keys]
                names = {word.arg for word in node.keywords} | {_text(key) for key in (*node.args[:1], *keys)}
            if isinstance(node, (ast.Assign, ast.Call)) and DEVICES in names:
                return self._place(node)
        return ""


def _classes(parser: ast.Call) -> set[str] | None:
    """The classes that a parser is made of; None where the call doesn't show them."""
    given = [*parser.args[:1], *(word.value for word in parser.keywords if word.arg == "dataclass_types")]
    if not given:
        return set()
    if not isinstance(given[0], (ast.Tuple, ast.List)):
        # A single name may be a list that was made elsewhere.
        return {name} if (name := _name(given[0])) in ARGUMENTS else None
    names = {_name(member) for member in given[0].elts}
    return None if "" in names else names


def _passed(call: ast.Call, *names: str) -> bool:
    """Whether a call has one of these arguments, and not as None or False; an unknown value counts as one."""
    values = [word.value for word in call.keywords if word.arg in names]
    return any(_constant(value) not in (None, False) for value in values)


def _is_first_argument(call: ast.Call) -> bool:
    """Whether a call is sys.argv[1].endswith(...)."""
    item = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(item, ast.Subscript) and _name(item.value) == "argv" and _constant(item.slice) == 1


def _name(node: ast.AST) -> str:
    """The last part of a (dotted) name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _constant(node: ast.AST | None) -> object:
    """A constant's value; the node itself where it is none."""
    return node.value if isinstance(node, ast.Constant) else node
