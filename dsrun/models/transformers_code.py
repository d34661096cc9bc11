"""The installed transformers' classes for a model_type, read from its source files: it takes seconds to import.

The tables are lists of pairs (models/auto/modeling_auto.py), the rest are constants of classes. Where transformers
isn't installed, as in a browser, the answers are those that were recorded of one release (transformers_code.json, made
by `python -m tools.transformers_code`).
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
MASKED = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
ENCODER_DECODER = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"
MULTIMODAL = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
TEXT_CONFIG = "text_config"
"""The key of the text part in the config of a model that has others, too."""
SUB_CONFIGS = {"sub_configs", "sub_configs_defaults"}
"""Names of the table of a config's parts in its class, by release."""
STATE_PACKAGES = {
    "fla": "flash-linear-attention", "flash_linear_attention": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm", "mamba_2_ssm": "mamba-ssm",
}  # fmt: skip
"""Packages of kernels by their modules' names, or transformers' -> as pip has them."""
SPEECH = ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "MODEL_FOR_CTC_MAPPING_NAMES")
ALL = "MODEL_MAPPING_NAMES"
AUTO = "models/auto/modeling_auto.py"
SDPA = "_supports_sdpa"
CAPPED = frozenset(("gemma2", "vaultgemma"))
"""Types whose attention caps its scores. torch's SDPA leaves the caps out without a word, and the classes say that they
have SDPA in transformers 5.0 to 5.17 at least; in 5.23 they say that they haven't."""
RECORD = Path(__file__).with_suffix(".json")
Answer = TypeVar("Answer")
Words = ParamSpec("Words")


def recorded(
    made: Callable[[Any], Any], empty: Any
) -> Callable[[Callable[Words, Answer]], Callable[Words, Answer]]:
    """A question to transformers' source that the record answers where there is no source.

    made: the answer from JSON. empty: the answer to what the record doesn't have.
    """

    def asked(read: Callable[Words, Answer]) -> Callable[Words, Answer]:
        @functools.wraps(read)
        def answered(*words: Words.args, **named: Words.kwargs) -> Answer:
            if _folder() is not None:
                return read(*words, **named)
            value = record()["answers"][read.__name__].get(" ".join(map(str, (*words, *named.values()))))
            answer: Answer = empty if value is None else made(value)
            return answer

        return answered

    return asked


def _sets(rows: list[list[str]]) -> tuple[frozenset[str], ...]:
    return tuple(map(frozenset, rows))


@functools.cache
def record() -> dict[str, Any]:
    """What was recorded of a release: its version under "transformers", its tables, and its "answers" by question."""
    value: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return value


@functools.cache
def table(name: str) -> Mapping[str, str]:
    """model_type -> the class that one of the tables in modeling_auto.py names."""
    folder = _folder()
    if folder is None:
        return MappingProxyType(record()["tables"].get(name, {}))
    path = folder / AUTO
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    # Only the table is parsed: the whole file takes longer than all else that happens before a job starts.
    match = re.search(rf"^{name}\b.*?^\)", text, re.MULTILINE | re.DOTALL)
    node = ast.parse(match[0]).body[0] if match else None
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Call):
        return MappingProxyType({})
    return MappingProxyType(_pairs(node.value.args[0]) if node.value.args else {})


def causal_class(model_type: str) -> str | None:
    """The name of the class that AutoModelForCausalLM takes for a model_type; None where there is none."""
    return table(CAUSAL).get(model_type)


def multimodal_class(model_type: str) -> str | None:
    """The class of models of images, videos or sound beside text for a model_type; None where there is none."""
    return next((table(name)[model_type] for name in MULTIMODAL if model_type in table(name)), None)


@recorded(tuple, ())
def required_inputs(model_type: str, name: str) -> tuple[str, ...]:
    """The inputs without which a model's class can't compute: arguments of its forward that have no default.

    Empty where the class isn't found, or has the forward of a class in another file.
    """
    path = _module_of(model_type, name)
    node = _classes(path).get(name) if path else None
    forward = next((part for part in node.body if _is_called(part, "forward")), None) if node else None
    if not isinstance(forward, ast.FunctionDef):
        return ()
    taken = [*forward.args.posonlyargs, *forward.args.args]
    return tuple(argument.arg for argument in taken[1 : len(taken) - len(forward.args.defaults)])


@recorded(tuple, ())
def kernel_packages(model_type: str) -> tuple[str, ...]:
    """The packages whose kernels a model's layers with a state take, as pip names them, by the source of its class.

    Since 5.20 a function names its package, before that the module asks which of them are there.
    """
    name = causal_class(model_type) or multimodal_class(model_type)
    path = _module_of(model_type, name) if name else None
    text = path.read_text(encoding="utf-8") if path else ""
    asked = re.findall(r"func_from_hub_with_fallback\(\s*\"\w+\",\s*\"(\w+)\"", text)
    asked += [name for name in re.findall(r"\bis_(\w+?)_available\b", text) if name in STATE_PACKAGES]
    return tuple(dict.fromkeys(STATE_PACKAGES.get(name, name.replace("_", "-")) for name in asked))


@recorded(str, None)
def text_type(model_type: str) -> str | None:
    """The model_type of the text part of a model that has others beside it; None where transformers knows none."""
    classes = _config_classes(model_type)
    texts = [node for node in classes.values() if _value(node, "base_config_key") == TEXT_CONFIG]
    whole = next((node for node in classes.values() if _value(node, "model_type") == model_type), None)
    if whole and (name := _sub_config(whole, TEXT_CONFIG)) in classes:
        texts.insert(0, classes[name])
    names = (_value(node, "model_type") for node in texts)
    return next((name for name in names if isinstance(name, str)), None)


def _sub_config(node: ast.ClassDef, key: str) -> str:
    """The name of the class that a config's class makes of the dictionary under a key; empty for none in its file."""
    for part in node.body:
        named = isinstance(part, ast.Assign) and {*map(_name, part.targets)} & SUB_CONFIGS
        if named and isinstance(part, ast.Assign) and isinstance(part.value, ast.Dict):
            pairs = zip(part.value.keys, part.value.values, strict=True)
            return next(
                (_name(value) for k, value in pairs if isinstance(k, ast.Constant) and k.value == key), ""
            )
    return ""


@recorded(dict, {})
def config_defaults(model_type: str) -> dict[str, Any]:
    """The values that transformers' config of a model_type has where a config.json has none, as far as they are
    plain numbers, texts and switches."""
    classes = _config_classes(model_type)
    node = next((node for node in classes.values() if _value(node, "model_type") == model_type), None)
    return _defaults(node, classes) if node else {}


@recorded(_sets, ())
def config_aliases(model_type: str) -> tuple[frozenset[str], ...]:
    """The keys of a model_type's config that stand for one another (its class's attribute_map)."""
    classes = _config_classes(model_type)
    node = next((node for node in classes.values() if _value(node, "model_type") == model_type), None)
    for part in node.body if node else ():
        if isinstance(part, ast.Assign) and "attribute_map" in map(_name, part.targets):
            pairs = (
                zip(part.value.keys, part.value.values, strict=True)
                if isinstance(part.value, ast.Dict)
                else ()
            )
            constants = (
                (k.value, v.value)
                for k, v in pairs
                if isinstance(k, ast.Constant) and isinstance(v, ast.Constant)
            )
            return tuple(frozenset(map(str, pair)) for pair in constants)
    return ()


def _defaults(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> dict[str, Any]:
    """A config class's defaults, after those of the classes in its file that it inherits from."""
    bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
    values = {key: value for base in bases for key, value in _defaults(classes[base], classes).items()}
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):  # fields of a dataclass
            pairs = [(part.target.id, part.value)]
        elif _is_called(part, "__init__") and isinstance(
            part, ast.FunctionDef
        ):  # as releases before 5.4 have it
            names = [argument.arg for argument in part.args.args]
            pairs = list(zip(reversed(names), reversed(part.args.defaults)))  # noqa: B905  (self has none)
        else:
            continue
        values |= {name: value.value for name, value in pairs if isinstance(value, ast.Constant)}
    return values


@functools.cache
def _config_classes(model_type: str) -> Mapping[str, ast.ClassDef]:
    """The classes in the file with a model_type's config; none where there is no such file."""
    models = _source() / "models"
    usual = model_type.replace("-", "_")
    for module in (usual, usual.removesuffix("_text"), usual.removesuffix("_text_model")):
        path = models / module / f"configuration_{module}.py"
        if path.is_file():
            return _classes(path)
    text = f'model_type = "{model_type}"'
    files = (path for path in sorted(models.glob("*/configuration_*.py")) if text in path.read_text("utf-8"))
    found = next(files, None)
    return _classes(found) if found else MappingProxyType({})


def _value(node: ast.ClassDef, name: str) -> object:
    """The constant that a class's body gives a name."""
    for part in node.body:
        targets = part.targets if isinstance(part, ast.Assign) else []
        if name in map(_name, targets):
            value = part.value if isinstance(part, ast.Assign) else None
            return value.value if isinstance(value, ast.Constant) else None
    return None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _is_called(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == name


@recorded(bool, None)
def supports(model_type: str, flag: str) -> bool | None:
    """A class flag of a language model, or of one with more than text: `_supports_sdpa`, `_supports_flash_attn`.

    None where the class, or the flag's value, isn't a plain constant that can be read.
    """
    if flag == SDPA and model_type in CAPPED:
        return False
    name = causal_class(model_type) or multimodal_class(model_type)
    path = _module_of(model_type, name) if name else None
    return _constant(_classes(path), str(name), flag) if path else None


@functools.cache
def _folder() -> Path | None:
    spec = importlib.util.find_spec("transformers")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _source() -> Path:
    """The folder of the installed transformers, for what is asked only where it is there."""
    if folder := _folder():
        return folder
    raise FileNotFoundError("transformers is not installed")


def _pairs(node: ast.expr) -> dict[str, str]:
    """A list of (model_type, class); of several classes the first."""
    classes = {}
    for pair in node.elts if isinstance(node, ast.List) else ():
        if isinstance(pair, ast.Tuple) and len(pair.elts) == 2:
            key, value = pair.elts
            if isinstance(value, ast.Tuple) and value.elts:
                value = value.elts[0]
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                classes[str(key.value)] = str(value.value)
    return classes


def _module_of(model_type: str, name: str) -> Path | None:
    """The file that defines a class: by the model_type, else by looking."""
    models = _source() / "models"
    usual = model_type.replace("-", "_")
    for module in (usual, usual.removesuffix("_text")):
        path = models / module / f"modeling_{module}.py"
        if path.is_file() and name in _classes(path):
            return path
    text = f"class {name}("
    return next((p for p in sorted(models.glob("*/modeling_*.py")) if text in p.read_text("utf-8")), None)


@functools.cache
def _classes(path: Path) -> Mapping[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _constant(classes: Mapping[str, ast.ClassDef], name: str, flag: str) -> bool | None:
    """A flag of a class or of what it inherits from in the same file; PreTrainedModel's own are False."""
    if name not in classes:
        return False if name == "PreTrainedModel" else None
    if any(flag in map(_name, part.targets) for part in classes[name].body if isinstance(part, ast.Assign)):
        constant = _value(classes[name], flag)
        return constant if isinstance(constant, bool) else None
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    values = [_constant(classes, base, flag) for base in bases]
    return next((value for value in values if value is not None), None)
