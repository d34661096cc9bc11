"""Shell and sbatch scripts: the command in them that trains, with what its launcher and variables say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import yaml

from dsrun.trainers import arguments, slurm

VARIABLE = re.compile(r"\$(?:\{(?P<long>\w+)(?::?[-=](?P<default>[^}]*))?\}|(?P<short>\w+))")
ASSIGNMENT = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
WHOLE = re.compile(r"\$(?:\{\w+\}|\w+)")
"""A word that is a variable and nothing else: without quotes the shell makes words of its value."""
ARRAY = re.compile(
    r"(?:(?:export|local|readonly|declare(?:\s+-\w+)?)\s+)?(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=\((?P<words>.*)\)\s*;?",
    re.DOTALL,
)
OPENED = re.compile(r"(?:^|\s)[A-Za-z_]\w*\+?=\((?!\()")
"""The beginning of an array."""
ELEMENTS = re.compile(r"\$\{(?P<name>\w+)\[(?P<place>@|\*|\d+)\]\}")
SUBSTITUTED = re.compile(r"\$\((?!\()(?:[^()]|\([^()]*\))*\)|`[^`]*`")
ARITHMETIC = re.compile(r"\$\(\([^()]*\)\)")
SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(?P<end>\w+)\1")
REDIRECTED = re.compile(r"\d?>{1,2}&?\S*|&")
JOINED = re.compile(r"(?<!\S)(?:\d?>&\d|\d?>&-|&>>?\s*\S+)")
"""Redirections with an & that ends no command."""
COMMENT = re.compile(
    r"""'[^']*(?:'|\Z)|"(?:[^"\\]|\\.|\\\Z)*(?:"|\Z)|\\.\#*|(?P<comment>(?<![^\s;|&()])\#.*)"""
)
"""What is quoted, or a comment: a # that begins a word. One that is quoted, or inside a word, is text."""
WRAPPERS = (
    "srun",
    "nohup",
    "time",
    "exec",
    "sudo",
    "env",
    "stdbuf",
    "numactl",
    "nice",
    "ionice",
    "proxychains",
)
"""Programs that run the command behind them."""
NOT_TRAINING = (
    "preprocess",
    "export",
    "chat",
    "infer",
    "eval",
    "deploy",
    "webui",
    "web-ui",
    "api",
    "merge-lora",
    "app",
    "ls",
    "download",
    "cp",
)
"""Words behind a trainer's program that start something else."""
LAUNCHERS = {"deepspeed": "deepspeed", "torchrun": "torchrun", "accelerate": "accelerate"}
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}
"""Modules that are launchers."""
TRAINING_MODULES = {
    "axolotl.cli.train": "axolotl",
    "llamafactory.cli": "llama-factory",
    "swift.cli.sft": "ms-swift",
    "trl.scripts.sft": "trl",
}
SWITCHES = frozenset({"standalone", "module", "m", "no_python", "run_path", "use_env", "multi_gpu"})
"""Options of launchers that take no value, beside those that are declared so."""


@dataclass
class Command:
    """A command that trains."""

    program: str
    """The trainer's program, or a script's path."""
    line: int
    trainer: str = ""
    """The trainer whose program it is; empty for a script."""
    words: tuple[str, ...] = ()
    """The arguments behind it."""
    launcher: str = ""
    launched: dict[str, Any] = field(default_factory=dict)
    """The launcher's options."""
    variables: dict[str, str] = field(default_factory=dict)
    subcommand: str = ""


@dataclass
class Script:
    """A script, taken apart."""

    commands: list[Command] = field(default_factory=list)
    """The commands that train."""
    others: list[tuple[int, str]] = field(default_factory=list)
    """Commands that are none of those, with their lines."""
    directives: list[str] = field(default_factory=list)
    """#SBATCH lines."""
    documents: dict[str, str] = field(default_factory=dict)
    """Files that it writes by a heredoc, with their texts."""


def read(text: str) -> Script:
    """A script taken apart. What can't be read as words is among the others."""
    script, values = Script(), Values(queue=slurm.variables(text))
    for number, line in _logical(text, script):
        if array := ARRAY.fullmatch(line):
            values.keep(array)
            continue
        for part in _parts(line):
            _command(part, number, values, script)
    return script


@dataclass
class Values:
    """What a script's variables hold, as far as it sets them."""

    texts: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    queue: dict[str, str] = field(default_factory=dict)
    """What Slurm sets, as the script's own lines for it say."""

    def keep(self, array: re.Match[str]) -> None:
        """Keep the words of an array; `+=` appends."""
        words = [word for part in _parts(array["words"]) for word in self.filled(part)]
        self.arrays[array["name"]] = [*(self.arrays.get(array["name"], ()) if array["more"] else ()), *words]

    def filled(self, words: Sequence[str]) -> list[str]:
        """A command's words with the variables in them. An array, and a variable by itself that holds options or a
        command, are as many words as they hold."""
        filled: list[str] = []
        for word in words:
            element = ELEMENTS.fullmatch(word)
            array = self.arrays.get(element["name"]) if element else None
            if element and array is not None and element["place"] in "@*":
                filled += array
                continue
            value = self.text(word)
            # Quotes are gone by now: a path with a space in it, which begins with no dash, was in some.
            several = WHOLE.fullmatch(word) and " " in value and (value.startswith("-") or not filled)
            filled += split(value) if several else [value]
        return filled

    def text(self, word: str) -> str:
        """A word with its variables filled in."""

        def value(match: re.Match[str]) -> str:
            name = match["long"] or match["short"]
            known = {**self.queue, **self.texts}
            return known.get(name, match["default"] if match["default"] is not None else match[0])

        def element(match: re.Match[str]) -> str:
            array = self.arrays.get(match["name"], [])
            if match["place"] in "@*":
                return " ".join(array) or match[0]
            return array[int(match["place"])] if int(match["place"]) < len(array) else match[0]

        def calculated(match: re.Match[str]) -> str:
            names = re.sub(r"\b[A-Za-z_]\w*", lambda name: self.text(f"${name[0]}"), match[0][3:-2])
            return str(result) if (result := _product(names)) is not None else match[0]

        return ARITHMETIC.sub(calculated, VARIABLE.sub(value, ELEMENTS.sub(element, word)))


def _logical(text: str, script: Script) -> Iterator[tuple[int, str]]:
    """Lines with those that a backslash goes on to, without comments; heredocs are kept aside."""
    lines = iter(enumerate(text.splitlines(), 1))
    for number, raw in lines:
        line = uncommented(raw)
        while line.rstrip().endswith("\\"):
            _, more = next(lines, (0, ""))
            line = uncommented(f"{line.rstrip()[:-1]} {more}")
        while OPENED.search(line) and line.count("(") > line.count(")"):
            _, more = next(lines, (0, ")"))
            line = uncommented(f"{line} {more}")
        stripped = line.strip()
        if raw.strip().startswith(("#SBATCH", "#PBS", "#BSUB")):
            script.directives.append(raw.strip())
        if not stripped:
            continue
        if heredoc := HEREDOC.search(line):
            body = []
            for _, inner in lines:
                if inner.strip() == heredoc["end"]:
                    break
                body.append(inner)
            name = re.search(r">\s*(\S+)", line)
            script.documents[name[1].strip("'\"") if name else f"line {number}"] = "\n".join(body)
            continue
        yield number, stripped


def _parts(line: str) -> Iterator[list[str]]:
    """The commands of a line, in words."""
    try:
        line = JOINED.sub(" ", SUBSTITUTED.sub(_named, ARITHMETIC.sub(_close, uncommented(line))))
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
        lexer.whitespace_split, lexer.commenters = True, ""
        words = list(lexer)
    except ValueError:
        yield [line]
        return
    part: list[str] = []
    for word in words:
        if word in (";", "&&", "||", "|", "&", ";;"):
            if part:
                yield part
            part = []
        else:
            part.append(word)
    if part:
        yield part


def uncommented(text: str) -> str:
    """A text without the shell's comments, each to the end of its line."""
    return COMMENT.sub(lambda match: "" if match["comment"] else match[0], text)


def _named(match: re.Match[str]) -> str:
    """What a command prints, as one word: $(scontrol...)."""
    inner = match[0].strip("`") if match[0].startswith("`") else match[0][2:-1]
    program = re.sub(r"[^\w./-]", "", (inner.split() or [""])[0]).rstrip(".")
    return f"$({program}...)"


def _close(match: re.Match[str]) -> str:
    """A sum without the spaces in it."""
    return re.sub(r"\s", "", match[0])


def _product(text: str) -> int | None:
    """Whole numbers multiplied and divided from left to right, as the shell does; None for other sums."""
    if not re.fullmatch(r"\s*\d+(\s*[*/]\s*\d+)*\s*", text):
        return None
    first, *rest = re.findall(r"\d+|[*/]", text)
    made = int(first)
    for sign, number in zip(rest[::2], map(int, rest[1::2]), strict=True):
        if sign == "/" and not number:
            return None
        made = made * number if sign == "*" else made // number
    return made


def split(text: str) -> list[str]:
    """A text's words; itself where its quotes are open."""
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def _command(words: list[str], line: int, values: Values, script: Script) -> None:
    own: dict[str, str] = {}
    words = values.filled(words)
    if words and words[0] == "export":
        words = words[1:]
        if not any("=" in word for word in words):
            return
    while words and (match := ASSIGNMENT.fullmatch(words[0])):
        own[match["name"]] = match["value"]
        words = words[1:]
    if not words:
        values.texts |= own
        return
    if inner := _of_a_shell(words):
        for part in _parts(inner):
            _command(part, line, replace(values, texts={**values.texts, **own}), script)
        return
    words = [word for word in words if not REDIRECTED.fullmatch(word)]
    command = _training(words, line)
    if command is None:
        script.others.append((line, shlex.join(words)))
        return
    command.variables = {**values.texts, **own}
    script.commands.append(command)


def _of_a_shell(words: Sequence[str]) -> str:
    """The commands that a shell is given as a text (`srun bash -c "..."`); empty for another command."""
    words = _unwrapped(list(words))
    if not words or PurePath(words[0]).name not in SHELLS:
        return ""
    flag = next((place for place, word in enumerate(words) if re.fullmatch(r"-\w*c", word)), None)
    return words[flag + 1] if flag is not None and flag + 1 < len(words) else ""


def _training(words: list[str], line: int) -> Command | None:
    """The training that a command starts; None for another command."""
    from dsrun.trainers import trainers

    words = _unwrapped(words)
    if not words:
        return None
    program = PurePath(words[0]).name
    if program in LAUNCHERS or (program == "accelerate" and words[1:2] == ["launch"]):
        rest = words[2:] if program == "accelerate" else words[1:]
        if program == "accelerate" and words[1:2] != ["launch"]:
            return None
        return _launched(LAUNCHERS[program], rest, line)
    if re.fullmatch(r"python[\d.]*", program):
        return _python(words[1:], line)
    for trainer in trainers().values():
        if program in trainer.starts:
            rest = words[1:]
            if program == "tune" and rest[:1] == ["run"]:
                return _tuned(rest[1:], line)
            kind = next((word for word in rest if not word.startswith("-")), "")
            if kind in NOT_TRAINING or program == "tune":
                return None
            named = rest.index(kind) + 1 if kind and not kind.endswith((".yaml", ".yml", ".json")) else 0
            return Command(program, line, trainer.name, tuple(rest[named:]), subcommand=kind if named else "")
    return _of_path(words, line) if program.endswith(".py") else None


def _unwrapped(words: list[str]) -> list[str]:
    """A command without the programs that only run it, and their options."""
    while words:
        program = PurePath(words[0]).name
        if program in ("uv", "poetry", "pdm", "conda") and words[1:2] == ["run"]:
            words = words[2:]
        elif program in WRAPPERS or ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        elif words[0].startswith("-"):
            takes = (
                len(words) > 1
                and "=" not in words[0]
                and not words[1].startswith("-")
                and not _starts(words[1])
            )
            words = words[2 if takes else 1 :]
        else:
            return words
    return words


def _starts(word: str) -> bool:
    """Whether a word is a program that trains, or starts one that does."""
    from dsrun.trainers import trainers

    name = PurePath(word).name
    known = {start for trainer in trainers().values() for start in trainer.starts}
    return (
        name in known
        or name in LAUNCHERS
        or re.fullmatch(r"python[\d.]*|.*\.py", name) is not None
        or name in SHELLS
    )


def _python(words: list[str], line: int) -> Command | None:
    while words and words[0].startswith("-") and words[0] != "-m":
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        module, rest = words[1], words[2:]
        if module in MODULES:
            return _launched(MODULES[module], rest[1:] if rest[:1] == ["launch"] else rest, line)
        if module in TRAINING_MODULES:
            rest = rest[1:] if rest[:1] in (["train"], ["sft"]) else rest
            return Command(module, line, TRAINING_MODULES[module], tuple(rest))
        return None
    return _of_path(words, line) if words and words[0].endswith(".py") else None


def _of_path(words: list[str], line: int) -> Command:
    """A script by its path; a file of a trainer's own package is that trainer's, as its module is."""
    module = ".".join(PurePath(words[0]).with_suffix("").parts)
    trainer = next(
        (name for known, name in TRAINING_MODULES.items() if f".{module}".endswith(f".{known}")), ""
    )
    return Command(words[0], line, trainer, tuple(words[1:]))


def _launched(launcher: str, words: list[str], line: int) -> Command | None:
    """A launcher's options, then the script or module with its own."""
    options, rest = split_options(words, launcher)
    if not rest:
        return None
    module = bool(options.get("module") or options.get("m"))
    program = rest[0]
    inner = _python(["-m", *rest], line) if module else None
    command = inner or (_training(rest, line) if _starts(program) else None)
    command = command or Command(program, line, words=tuple(rest[1:]))
    command.launcher, command.launched = launcher, options
    return command


def split_options(words: Sequence[str], launcher: str) -> tuple[dict[str, Any], list[str]]:
    """A launcher's options, and what stands behind them."""
    known = arguments.declared(launcher)
    options: dict[str, Any] = {}
    left = list(words)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if equals:
            options[name] = scalar(value)
        elif known.get(name, None) is False or name in SWITCHES or not left:
            options[name] = True
        else:
            options[name] = scalar(left.pop(0))
    return options, left


def _tuned(words: list[str], line: int) -> Command | None:
    """`tune run [torchrun's options] RECIPE --config FILE [key=value ...]`."""
    options, rest = split_options(words, "torchrun")
    if not rest:
        return None
    return Command("tune", line, "torchtune", tuple(rest[1:]), "torchrun", options, subcommand=rest[0])


def own_arguments(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Arguments by name (--name value ..., --name=value, name=value), and words that are none."""
    given: dict[str, Any] = {}
    loose: list[str] = []
    name = ""
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("--") or (word.startswith("-") and len(word) == 2):
            name = key.lstrip("-").replace("-", "_")
            given[name] = scalar(value) if equals else True
            name = "" if equals else name
        elif equals and re.fullmatch(r"[A-Za-z_][\w.]*", key) and (not name or given[name] is not True):
            given[key], name = scalar(value), ""
        elif name:
            before = given[name]
            new = scalar(word)
            given[name] = (
                new if before is True else [*(before if isinstance(before, list) else [before]), new]
            )
        else:
            loose.append(word)
    return given, loose


def scalar(text: str) -> Any:
    """A word as the number, truth or list that it is; a number in YAML's blind spot (1e-4), too."""
    if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", text):
        return float(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, (int, float, bool, list, dict)) else text
