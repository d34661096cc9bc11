"""How a user's script takes its DeepSpeed config, as far as its source tells. It is read, never imported.

The script and the modules beside it that it imports are looked at. DeepSpeed's own arguments
(deepspeed.add_config_arguments), Hugging Face's (HfArgumentParser with TrainingArguments) and an option of the script's
own are told apart.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path

from dsrun.errors import DsrunError, Problem
from dsrun.files import explained

DEEPSPEED, HF, ACCELERATE = "deepspeed", "hf", "accelerate"
DEEPSPEEDS_OWN = ("--deepspeed", "--deepspeed_config")
HFS_OWN = ("--deepspeed",)
OPTION = re.compile(r"--?(?:deepspeed|ds)(?:[-_](?:config|json|cfg|file|path|name))*")
"""What scripts call an option for the config's file."""
ARGUMENTS = frozenset(("TrainingArguments", "Seq2SeqTrainingArguments"))
PARSERS = frozenset(("HfArgumentParser", "TrlParser"))
TRAINERS = frozenset(("Trainer", "Seq2SeqTrainer"))
FLAGS = frozenset(("store_true", "store_false", "store_const", "count", "help", "version"))
KEY = "deepspeed"
"""Of TrainingArguments."""
DEVICES, LOCAL_RANK = "CUDA_VISIBLE_DEVICES", "--local_rank"
MOST_FILES = 300
MOST_BYTES = 2 << 20


@dataclass(frozen=True)
class ScriptSource:
    """What a script's source tells.

    ways: the ways in which it takes a config's file, each the words before the file's name; a word that ends in "=" and
    the name are one. flags: config-like options that take no value. own_config: where it makes the config itself,
    "file:line". argv_file: it looks whether its first argument is a file of arguments. dotlist: to such a file it takes
    NAME=VALUE words. plain_arguments: Hugging Face's arguments are what the parser fills, with nothing in between.
    """

    reader: str | None = None
    ways: tuple[tuple[str, ...], ...] = ()
    flags: frozenset[str] = frozenset()
    own_config: str = ""
    sets_devices: str = ""
    """Where it sets CUDA_VISIBLE_DEVICES itself: FILE:LINE."""
    argv_file: bool = False
    dotlist: bool = False
    plain_arguments: bool = False
    imports: frozenset[str] | None = None
    """The packages that it imports, by their top names; None where no source was read."""
    takes_local_rank: bool = False
    """Its parser knows --local_rank."""
    wants_deepspeed: bool = False
    """It imports deepspeed, takes a config for it, or names one to the Trainer."""
    accelerator: str = ""
    """Where it makes accelerate's Accelerator: FILE:LINE."""
    names_gloo: bool = False
    """It hands accelerate the backend of CPU ranks: InitProcessGroupKwargs(backend=...)."""
    on_cpu: bool = False
    """It says that it trains on CPUs: Accelerator(cpu=...), TrainingArguments(use_cpu=...)."""


def of_script(script: Path) -> ScriptSource:
    """What the source of a script tells. Raises DsrunError where it is no Python that can be read."""
    return _told(script, script.resolve().parent)


def of_module(path: Path, root: Path) -> ScriptSource:
    """The same of a module; root: the folder that its top package lies in."""
    return _told(path, path if _is_pythons_own(root) else root)


def _is_pythons_own(root: Path) -> bool:
    """Whether a folder is a Python's standard library, which knows nothing of DeepSpeed: what a module of it imports is
    of no interest, and is hundreds of files."""
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
            what = f"there is no module {name!r}: {top} is no package"
            raise DsrunError(what, where="--module", hint=_elsewhere(name))
        return Path(spec.origin), Path(spec.origin).parent
    for folder in map(Path, spec.submodule_search_locations):
        place = folder.joinpath(*rest)
        for path in (place.with_suffix(".py") if rest else place / "__main__.py", place / "__main__.py"):
            if path.is_file():
                return path, folder.parent
    what = f"there is no module {name!r} that can be run"
    raise DsrunError(what, where="--module", hint=f"{top} is {spec.submodule_search_locations[0]}.")


def _elsewhere(name: str) -> str:
    if name.endswith(".py") or "/" in name:
        return (
            f"That is a file: leave out -m, or name the module: {name.removesuffix('.py').replace('/', '.')}"
        )
    return "It is looked for in this folder, in PYTHONPATH and where dsrun is installed."


def _told(path: Path, root: Path) -> ScriptSource:
    files = [*_with_imports(path, root)]
    found = [(depth, _File(file, tree).source()) for file, depth, tree in files]
    nearest = min((depth for depth, one in found if one.ways), default=None)
    ways = [way for depth, one in found if depth == nearest for way in one.ways]
    readers = {one.reader for _, one in found}
    reader = next((one for one in (HF, ACCELERATE, DEEPSPEED) if one in readers), None)
    source = ScriptSource(
        reader=reader,
        ways=tuple(dict.fromkeys(ways)),
        flags=frozenset().union(*(one.flags for _, one in found)),
        own_config=next((one.own_config for _, one in found if one.own_config), ""),
        sets_devices=next((one.sets_devices for _, one in found if one.sets_devices), ""),
        argv_file=any(one.argv_file for _, one in found),
        dotlist=any(one.dotlist for _, one in found),
        plain_arguments=any(one.plain_arguments for _, one in found),
        imports=frozenset().union(*(one.imports or () for _, one in found)),
        takes_local_rank=any(one.takes_local_rank for _, one in found),
        wants_deepspeed=any(one.wants_deepspeed for _, one in found),
        accelerator=next((one.accelerator for _, one in found if one.accelerator), ""),
        names_gloo=any(one.names_gloo for _, one in found),
        on_cpu=any(one.on_cpu for _, one in found),
    )
    if reader == HF:  # a config beside it is of another model, a frozen one
        return replace(source, own_config="")
    return source


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
        for found in _imported(tree, file, root):
            if found not in seen:
                seen.add(found)
                waiting.append((found, depth + 1))


def parsed(path: Path) -> ast.Module:
    """A file's tree. Raises DsrunError where it is no Python."""
    with explained("can't be read", path):
        content = path.read_bytes()[:MOST_BYTES]
    try:
        return ast.parse(content, str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else str(path)
        what = f"is not Python: {error.msg if isinstance(error, SyntaxError) else error}"
        raise DsrunError([Problem(what, where)]) from error


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
        self.calls = [(node, _name(node.func)) for node in self.nodes if isinstance(node, ast.Call)]
        self.names = {name for node in self.nodes if (name := _name(node))}

    def source(self) -> ScriptSource:
        called = {name for _, name in self.calls}
        takes_hfs = bool(called & PARSERS) and (
            "TrlParser" in called or any(self._has_training_arguments(node) for node in self._parsers())
        )
        options, flags = self._options()
        ways: list[tuple[str, ...]] = [HFS_OWN] * takes_hfs
        if "add_config_arguments" in called:
            ways.append(DEEPSPEEDS_OWN)
            flags |= {"--deepspeed"}
        else:
            switch = ("--deepspeed",) if "--deepspeed" in flags else ()
            ways += [(*switch, option) for option in options]
        makes_hfs = bool(called & (ARGUMENTS | TRAINERS))
        own = self._own_config()
        accelerator = self._accelerator()
        reader = HF if takes_hfs or makes_hfs else ACCELERATE if accelerator else None
        if reader is None and (ways or own or "initialize" in called):
            reader = DEEPSPEED
        return ScriptSource(
            reader=reader,
            ways=tuple(ways),
            flags=frozenset(flags),
            own_config=own,
            sets_devices=self._sets_devices(),
            argv_file=any(self._is_first_argument(node) for node in self.nodes),
            dotlist="from_cli" in called,
            plain_arguments=any(self._is_plain(node) for node in self._parsers()),
            imports=frozenset(self._imports()),
            takes_local_rank=LOCAL_RANK in self._words(),
            wants_deepspeed=reader == DEEPSPEED
            or DEEPSPEED in self._imports()
            or any(self._says(name, KEY) for name in ARGUMENTS),
            accelerator=accelerator,
            names_gloo=self._says("InitProcessGroupKwargs", "backend"),
            on_cpu=(bool(accelerator) and self._says("Accelerator", "cpu"))
            or any(self._says(name, "use_cpu") for name in ARGUMENTS),
        )

    def _imports(self) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.split(".")[0]

    def _words(self) -> set[str | None]:
        """The names of the options that it declares."""
        declared = [node for node, name in self.calls if name in ("add_argument", "option")]
        return {_text(word) for node in declared for word in node.args}

    def _accelerator(self) -> str:
        """Where accelerate's Accelerator is made, which is not the only class of that name."""
        imported = any(
            isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == ACCELERATE
            for node in self.nodes
        )
        for node, name in self.calls:
            attribute = isinstance(node.func, ast.Attribute) and _name(node.func.value) == ACCELERATE
            if name == "Accelerator" and (imported or attribute):
                return f"{self.path}:{node.lineno}"
        return ""

    def _says(self, call: str, argument: str) -> bool:
        """Whether a call has an argument that is not plainly nothing; a value that isn't known counts as one."""
        given = [
            word.value
            for node, name in self.calls
            if name == call
            for word in node.keywords
            if word.arg == argument
        ]
        return any(_constant(value) not in (None, False) for value in given)

    def _parsers(self) -> list[ast.Call]:
        return [node for node, name in self.calls if name in PARSERS]

    def _has_training_arguments(self, call: ast.Call) -> bool:
        """Whether a parser fills TrainingArguments too: it may be made of other classes alone."""
        classes = self._classes(call)
        known = {name for name in self.names if name in ARGUMENTS}
        return classes is None or bool(known & classes) or bool(classes - known and self._subclasses(classes))

    def _classes(self, call: ast.Call) -> set[str] | None:
        """The classes that a parser is made of; None where the call doesn't say."""
        given = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "dataclass_types")]
        if not given:
            return set()
        if not isinstance(given[0], (ast.Tuple, ast.List)):
            # A single name may be a list that was made elsewhere.
            return {name} if (name := _name(given[0])) in ARGUMENTS else None
        names = {_name(member) for member in given[0].elts}
        return None if "" in names else names

    def _subclasses(self, classes: set[str]) -> set[str]:
        """Those of the classes that may be TrainingArguments by another name: made of them here, or imported."""
        made = {
            node.name: {_name(base) for base in node.bases}
            for node in self.nodes
            if isinstance(node, ast.ClassDef)
        }
        imported = {
            alias.asname or alias.name: alias.name
            for node in self.nodes
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] in ("transformers", "trl")
            for alias in node.names
        }
        return {
            name
            for name in classes
            if made.get(name, set()) & ARGUMENTS
            or imported.get(name, "") in ARGUMENTS
            or imported.get(name, "").endswith(("TrainingArguments", "Config"))
        }

    def _is_plain(self, call: ast.Call) -> bool:
        classes = self._classes(call) or set()
        own = {node.name for node in self.nodes if isinstance(node, ast.ClassDef)}
        return bool(classes & ARGUMENTS) and not classes & ARGUMENTS & own

    def _options(self) -> tuple[list[str], set[str]]:
        """Options for a config's file, and of the same names those without a value."""
        options: list[str] = []
        flags: set[str] = set()
        for node, name in self.calls:
            if name not in ("add_argument", "option"):
                continue
            words = [word for arg in node.args if (word := _text(arg)) and OPTION.fullmatch(word)]
            action = next((_text(word.value) for word in node.keywords if word.arg == "action"), None)
            is_flag = any(
                word.arg == "is_flag" and _constant(word.value) is True for word in node.keywords
            ) or (action in FLAGS)
            if words and is_flag:
                flags |= {*words}
            elif words:
                options.append(max(words, key=len))
        return options, flags

    def _own_config(self) -> str:
        """Where deepspeed.initialize gets a config that no option names."""
        given = [
            (node, word.value)
            for node, name in self.calls
            if name == "initialize"
            for word in node.keywords
            if word.arg in ("config", "config_params") and _constant(word.value) is not None
        ]
        # `args.deepspeed_config`, or what was read from it
        named = any(
            isinstance(node, ast.Attribute) and OPTION.fullmatch(f"--{node.attr}") for node in self.nodes
        )
        for node, _ in given:
            with_args = any(
                word.arg == "args" and _constant(word.value) is not None for word in node.keywords
            ) or bool(node.args)
            # With arguments that hold a config, DeepSpeed refuses another one.
            if with_args or not named:
                return f"{self.path}:{node.lineno}"
        return ""

    def _sets_devices(self) -> str:
        """Where CUDA_VISIBLE_DEVICES is set: os.environ[...] = ..., os.putenv(...), os.environ.update(...)."""
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                found = any(
                    isinstance(target, ast.Subscript)
                    and _name(target.value) == "environ"
                    and _text(target.slice) == DEVICES
                    for target in node.targets
                )
            elif isinstance(node, ast.Call) and _name(node.func) in ("putenv", "update"):
                keys = [key for arg in node.args if isinstance(arg, ast.Dict) for key in arg.keys if key]
                found = any(_text(word) == DEVICES for word in (*node.args[:1], *keys))
                found = found or any(word.arg == DEVICES for word in node.keywords)
            else:
                continue
            if found:
                return f"{self.path}:{node.lineno}"
        return ""

    def _is_first_argument(self, node: ast.AST) -> bool:
        """sys.argv[1].endswith(...)"""
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("endswith", "suffix")
            and isinstance(node.func.value, ast.Subscript)
            and _name(node.func.value.value) == "argv"
            and _constant(node.func.value.slice) == 1
        )


def _name(node: ast.AST) -> str:
    """The last part of a (dotted) name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.alias):
        return node.name.rpartition(".")[2]
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _constant(node: ast.AST) -> object:
    """A constant's value; the node itself where it is none."""
    return node.value if isinstance(node, ast.Constant) else node
