"""The contract of a rule: the context that it reads, the findings that it gives, how it is registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, update_wrapper, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from dsrun.config import tree
from dsrun.config.fix import Edit, Fix
from dsrun.config.schemas import schema
from dsrun.config.schemas import violations as schema_violations
from dsrun.config.schemas.schema import Node, Schema, Version
from dsrun.errors import DsrunError
from dsrun.json_numbers import is_number

if TYPE_CHECKING:
    from dsrun.config.reading.document import Document, SyntaxIssue

__all__ = [
    "Context",
    "Edit",
    "Finding",
    "Fix",
    "ModelInfo",
    "Rule",
    "Setting",
    "bad",
    "example",
    "good",
    "rule",
]

UNREADABLE = "unreadable"
"""The kind of the one issue of a text that can't be read at all."""

REFUSED = "refused"
FAILS = "fails"
DIFFERS = "differs"
EFFECTS = {
    REFUSED: "DeepSpeed stops while reading the config.",
    FAILS: "It starts, and fails later: in deepspeed.initialize, in the Trainer or at a step.",
    DIFFERS: "It trains, but silently does something other than the config says.",
}
"""The effects of an error: what DeepSpeed does."""

T = TypeVar("T")
Marked = TypeVar("Marked", bound=Callable[..., Any])
Config = Mapping[str, Any]
Function = Callable[["Context"], Iterator["Finding"]]


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the model for rules; None is unknown."""

    hidden_size: int | None = None
    """0 where the model's config has none."""
    attention_heads: int | None = None
    largest_parameter: int | None = None
    """Elements of its largest tensor."""
    parameters: int | None = None
    """Elements of all its weights."""
    model_type: str | None = None
    """transformers' name of the network, of its text part."""
    experts: int | None = None
    """Experts in a block of a mixture; 0 for a dense network."""


@dataclass(frozen=True)
class Setting:
    """The circumstances a config is checked for. None is unknown; checks that depend on it are skipped."""

    target: str = "deepspeed"
    """The reader of the file: deepspeed, hf, accelerate or lightning."""
    world_size: int | None = None
    """Number of all GPUs of the job."""
    nodes: int | None = None
    version: Version | None = None
    """The release of DeepSpeed, as schema.version_of gives it; None is the newest."""
    versions: Mapping[str, str] | None = None
    """Versions of DeepSpeed and of what is imported beside it, by name (dsrun/versions.py)."""
    upgrade_from: Version | None = None
    """The version the config was written for."""
    device: str | None = None
    """cuda or cpu."""
    bf16: bool | None = None
    """Whether the GPUs compute in bfloat16."""
    fp16: bool | None = None
    """Whether DeepSpeed takes fp16 on the GPUs."""
    gpu_memory_gib: float | None = None
    """Memory of each GPU."""
    trainer: Mapping[str, Any] | None = None
    """The TrainingArguments next to it under HF, by name."""
    model: ModelInfo | None = None
    script: str | None = None
    """The text of a script of which the names are checked, and no config."""
    launch: Mapping[str, Any] | None = None
    """The accelerate YAML that contains or names it (dsrun/config/accelerate/launch.py)."""

    @property
    def dialect(self) -> str:
        """The language of the file: DeepSpeed reads Hjson, all others JSON."""
        return "hjson" if self.target == "deepspeed" else "json"


@dataclass(frozen=True)
class Finding:
    """One result of a rule: where, what is wrong, and what would be right.

    A rule's function leaves out `rule`, and `severity` and `effect` unless the case is another one than the rule's.
    """

    path: str
    message: str
    suggestion: str
    fix: Fix | None = None
    severity: str = ""
    """error (it fails or does something else), warning or note."""
    effect: str = ""
    """The effect of an error, one of EFFECTS."""
    rule: str = ""
    """The rule's id."""
    line: int = 0
    """The line of a script; 0 where it is at a key."""

    @property
    def cited(self) -> str:
        """The message with the rule's id."""
        return f"{self.message} [{self.rule}]" if self.rule else self.message

    def __str__(self) -> str:
        place = f"{self.path}: " if self.path else ""
        return f"{place}{self.cited}. {self.suggestion}".rstrip(". ") + "."


@dataclass(frozen=True)
class Context:
    """The config and all that rules look at. The getters return None for a key that is absent, "auto" or of a wrong
    type.

    A rule checks existing values; the schema checks types. A flag or a number written as a string
    in a section where DeepSpeed converts it counts as the converted value.
    """

    config: Config
    setting: Setting = field(default_factory=Setting)
    violations: tuple[schema_violations.Violation, ...] = ()
    issues: tuple[SyntaxIssue, ...] = ()
    memory: dict[str, Any] = field(default_factory=dict)
    """The results of functions under @once, by name."""

    @property
    def target(self) -> str:
        return self.setting.target

    @property
    def world_size(self) -> int | None:
        return self.setting.world_size

    @property
    def by_trainer(self) -> bool:
        """Whether HF Trainer reads it."""
        return self.target == schema.HF

    @cached_property
    def schema(self) -> Schema:
        return schema.load(self.setting.version)

    @property
    def version(self) -> Version:
        return self.schema.version

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The config with each alias under the name it stands for, and with values as DeepSpeed converts them."""
        plain = self._named(self.config, self.schema.root)
        for violation in self.violations:
            if violation.kind == "converted" and violation.fix:
                path = self.schema.canonical(violation.path)
                if tree.get(plain, path, tree.MISSING) is not tree.MISSING:
                    tree.put(plain, path, violation.fix.edits[0].value)
        return plain

    def _named(self, value: Config, node: Node) -> dict[str, Any]:
        properties = node.get("properties", {})
        named: dict[str, Any] = {}
        for key, item in value.items():
            below = properties.get(key, {})
            name = below.get("x-alias-of", key)
            if name == key or name not in value:
                named[name] = self._named(item, below) if isinstance(item, dict) else item
        return named

    @cached_property
    def stage(self) -> int:
        """The ZeRO stage; the old `zero_optimization: true` is stage 1 (runtime/zero/config.py).

        "auto" is stage 2 where accelerate fills it in (accelerate/utils/dataclasses.py).
        """
        if isinstance(old := self.get("zero_optimization"), bool):
            return int(old)
        if self.get("zero_optimization.stage") == schema.AUTO and self.target in schema.FILLING:
            return 2
        return self.integer("zero_optimization.stage") or 0

    @property
    def precision(self) -> str | None:
        """fp16, bf16 or fp32, as the config enables it; None where "auto" leaves it open."""
        if self.flag("bf16.enabled"):
            return "bf16"
        if self.flag("fp16.enabled"):
            return "fp16"
        open_ = schema.AUTO in (self.get("bf16.enabled"), self.get("fp16.enabled"))
        return None if open_ else "fp32"

    @cached_property
    def values(self) -> dict[str, Any]:
        """Every section and value by its path, from one walk."""
        return dict(tree.everything(self.plain))

    def get(self, path: str) -> Any:
        return self.values.get(path)

    def has(self, path: str) -> bool:
        return path in self.values

    def is_auto(self, path: str) -> bool:
        return bool(self.get(path) == schema.AUTO)

    def section(self, path: str) -> dict[str, Any]:
        """The section at a path; {} where there is none."""
        value = self.values.get(path)
        return value if isinstance(value, dict) else {}

    def number(self, path: str) -> float | None:
        """A number, as `is_number` takes it."""
        value = self.values.get(path)
        return value if is_number(value) else None

    def integer(self, path: str) -> int | None:
        """A whole number; 2e8 counts, as DeepSpeed takes it for one."""
        value = self.number(path)
        return int(value) if value is not None and float(value).is_integer() else None

    def flag(self, path: str) -> bool | None:
        value = self.values.get(path)
        return value if isinstance(value, bool) else None

    def text(self, path: str) -> str | None:
        value = self.values.get(path)
        return value if isinstance(value, str) and value != schema.AUTO else None

    def argument(self, name: str) -> Any:
        """A TrainingArguments value; None where it (or all of them) isn't known."""
        return (self.setting.trainer or {}).get(name)


def once(function: Callable[[Context], T]) -> Callable[[Context], T]:
    """A function of the context whose result is kept, as many rules call it."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def remembered(context: Context) -> T:
        if name not in context.memory:
            context.memory[name] = function(context)
        result: T = context.memory[name]
        return result

    return remembered


@dataclass(frozen=True)
class Rule:
    """One check, of DeepSpeed releases `since` to `until`: (0, 19) is all of 0.19, (0, 19, 7) one patch."""

    id: str
    severity: str
    function: Function
    effect: str
    """The effect of its error, one of EFFECTS."""
    bad: Sequence[Config]
    """Examples, as `example` reads them."""
    good: Sequence[Config]
    since: Version
    until: Version

    @property
    def source(self) -> str:
        """Its explanation, which names the place in DeepSpeed's code."""
        return self.function.__doc__ or ""

    @property
    def about(self) -> str:
        """Its title."""
        return self.function.__name__.replace("_", " ")

    def holds_in(self, release: Version) -> bool:
        """Whether it is a rule of a release."""
        return self.since <= release and release[: len(self.until)] <= self.until

    def completed(self, finding: Finding) -> Finding:
        """A finding of its function, completed with the rule's id, severity and effect."""
        severity = finding.severity or self.severity
        effect = (finding.effect or self.effect) if severity == "error" else ""
        return replace(finding, rule=self.id, severity=severity, effect=effect)


def bad(*examples: Config) -> Callable[[Marked], Marked]:
    """Examples that a rule finds something in, as `example` reads them. One of an error has no other error."""
    return _keeping("bad", examples)


def good(*examples: Config) -> Callable[[Marked], Marked]:
    """Examples that are near a bad one, and have no error."""
    return _keeping("good", examples)


def _keeping(name: str, examples: Sequence[Config]) -> Callable[[Marked], Marked]:
    """A decorator that leaves examples on a function, where `rule` above it takes them."""

    def decorated(function: Marked) -> Marked:
        vars(function)[name] = examples
        return function

    return decorated


def rule(
    rule_id: str, kind: str, *, since: Version = (0, 0), until: Version = (9, 9)
) -> Callable[[Function | Callable[[], Function]], Rule]:
    """Makes a function a rule. kind: "warning", "note", or of an error what it leads to, one of EFFECTS.

    A function without a parameter returns the rule as data (kinds.py); any other yields its findings.
    """
    severity, effect = ("error", kind) if kind in EFFECTS else (kind, "")

    def made(function: Any) -> Rule:
        examples = {name: vars(function).pop(name, ()) for name in ("bad", "good")}
        if not function.__code__.co_argcount:
            function = update_wrapper(function(), function)
        return Rule(rule_id, severity, function, effect, **examples, since=since, until=until)

    return made


def example(given: Config) -> tuple[dict[str, Any], Setting, tuple[SyntaxIssue, ...]]:
    """An example's config, its setting, and the issues of its text.

    Keys of `given` that start with an underscore are the setting: _for, _world_size (4 if left out), _nodes,
    _version ("0.14"), _with (Setting.versions), _upgrade_from, _device, _bf16, _fp16, _gpu_memory_gib, _trainer,
    _launch, _script, _model (the fields of ModelInfo). _text is the config as a text. Otherwise what every config
    needs (batch sizes; for HF Trainer "auto" in the usual places) is added where it is missing, unless _bare is true.
    """
    settings = {SETTINGS[key]: value for key, value in given.items() if key in SETTINGS}
    config = {key: value for key, value in given.items() if key not in SETTINGS}
    text, bare = settings.pop("text", None), settings.pop("bare", False)
    settings |= {
        key: schema.version_of(settings[key]) for key in ("version", "upgrade_from") if key in settings
    }
    if "model" in settings:
        settings["model"] = ModelInfo(**settings["model"])
    setting = Setting(**{"world_size": 4, **settings})
    if text is not None:
        config, issues = _read(text, setting.dialect)
        return config, setting, issues
    return (config if bare else {**BASES.get(setting.target, {}), **config}), setting, ()


def read_config(data: bytes | str, name: str, dialect: str) -> Document:
    """The document of a config. Raises DsrunError as `document.read` does, and where it is no object."""
    from dsrun.config.reading import document

    read = document.read(data, name, dialect)
    if isinstance(read.value, dict):
        return read
    kinds: dict[type, str] = {list: "a list", str: "a text"}
    kind = kinds.get(type(read.value), "a single value")
    raise DsrunError(f"is {kind}, not a config", where=f"{name}:1:1", hint="A config is an object: { ... }")


def _read(text: str, dialect: str) -> tuple[Any, tuple[SyntaxIssue, ...]]:
    from dsrun.config.reading.document import Span, SyntaxIssue

    try:
        read = read_config(text, "example", dialect)
    except DsrunError as error:
        return {}, (SyntaxIssue(UNREADABLE, Span(0, 0, 1, 1), error.problems[0].what, ""),)
    return read.value, read.issues


SETTINGS = {
    **{f"_{field.name}": field.name for field in fields(Setting)},
    **{"_for": "target", "_with": "versions", "_bare": "bare", "_text": "text"},
}
AUTOS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
)  # fmt: skip
"""Keys that HF Trainer and accelerate fill in for everyone."""
BASES: dict[str, dict[str, Any]] = {
    "deepspeed": {"train_micro_batch_size_per_gpu": 1},
    "lightning": {},
    "hf": {**dict.fromkeys(AUTOS, schema.AUTO), "zero_optimization": {"stage": 2}},
    "accelerate": {**dict.fromkeys(AUTOS, schema.AUTO), "zero_optimization": {"stage": 2}},
}
