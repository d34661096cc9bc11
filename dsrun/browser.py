"""The Python interface as the page in the documentation calls it (docs/checker/): JSON in, JSON out.

Python runs in the reader's browser there, without processes, devices, or a DeepSpeed of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from dsrun import api
from dsrun.errors import DsrunError

BESIDE_OPTIONS = ("text", "texts", "name", "model")
"""What a request names beside a command's options."""


def answer(text: str) -> str:
    """The answer to a request, each as JSON: {"value": ...} in the command's form, or {"problems": [...]}.

    text: {"command": "validate", "text": ...} with the command's options, named as in Python, and "language".
    """
    request = json.loads(text)
    command = COMMANDS[request.pop("command")]
    os.environ["LC_ALL"] = request.pop("language", "en") + ".UTF-8"
    try:
        return json.dumps({"value": command(request)})
    except DsrunError as error:
        rows = [{"where": row.where, "what": row.what, "hint": row.hint} for row in error.problems]
        return json.dumps({"problems": rows})


def choices(_: Mapping[str, Any]) -> dict[str, Any]:
    """What the page's fields offer: GPUs and models with their summaries, and versions of DeepSpeed, newest first."""
    from dsrun import catalog
    from dsrun.config.schemas import schema
    from dsrun.models.model_files import list_models

    gpus = {name: catalog.read_toml(path)["summary"] for name, path in catalog.files("presets/gpus").items()}
    return {
        "gpus": gpus,
        "models": {model.name: model.summary for model in list_models([])},
        "versions": [schema.name_of(schema.nearest(version)) for version in reversed(schema.versions())],
    }


def _validate(request: Mapping[str, Any]) -> dict[str, Any]:
    return api.validate(request["text"], name=request.get("name"), **_options(request))


def _plan(request: Mapping[str, Any]) -> dict[str, Any]:
    return api.plan(request.get("model"), **_options(request))


def _diagnose(request: Mapping[str, Any]) -> dict[str, Any]:
    return api.diagnose(*request["texts"])


def _explain(request: Mapping[str, Any]) -> dict[str, Any]:
    return api.explain(request.get("name"), **_options(request))


def _options(request: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name not in BESIDE_OPTIONS}


COMMANDS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "validate": _validate,
    "plan": _plan,
    "diagnose": _diagnose,
    "explain": _explain,
    "choices": choices,
}
