"""The installed transformers' classes for a model_type, read from its source files: it takes seconds to import.

The tables are lists of pairs (models/auto/modeling_auto.py), the rest are constants of classes.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
MASKED = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
ENCODER_DECODER = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"
MULTIMODAL = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")
SPEECH = ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "MODEL_FOR_CTC_MAPPING_NAMES")
ALL = "MODEL_MAPPING_NAMES"
AUTO = "models/auto/modeling_auto.py"
SDPA = "_supports_sdpa"
CAPPED = frozenset(("gemma2", "vaultgemma"))
"""Types whose attention caps its scores. torch's SDPA leaves the caps out without a word, and the classes say that they
have SDPA in transformers 5.0 to 5.17 at least; in 5.23 they say that they haven't."""


@functools.cache
def table(name: str) -> Mapping[str, str]:
    """model_type -> the class that one of the tables in modeling_auto.py names; empty without transformers."""
    path = (_folder() or Path()) / AUTO
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


def supports(model_type: str, flag: str) -> bool | None:
    """A class flag of a causal language model: `_supports_sdpa`, `_supports_flash_attn`.

    None where the class, or the flag's value, isn't a plain constant that can be read.
    """
    if flag == SDPA and model_type in CAPPED:
        return False
    name = causal_class(model_type)
    path = _module_of(model_type, name) if name else None
    return _constant(_classes(path), str(name), flag) if path else None


@functools.cache
def _folder() -> Path | None:
    spec = importlib.util.find_spec("transformers")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


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
    models = (_folder() or Path()) / "models"
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
    for node in classes[name].body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == flag for target in targets):
            value = node.value if isinstance(node, ast.Assign) else None
            constant = value.value if isinstance(value, ast.Constant) else None
            return constant if isinstance(constant, bool) else None
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    values = [_constant(classes, base, flag) for base in bases]
    return next((value for value in values if value is not None), None)
