"""What a command line would ask for, for tests that begin behind it."""

from __future__ import annotations

from dsrun.jobs.assembly.finetune import FinetuneRequest
from dsrun.jobs.assembly.script.stages import ScriptRequest
from dsrun.options.commands import FinetuneOptions, LaunchOptions
from dsrun.options.layers import Resolved


def finetune_request(model: str = "llama-tiny", overrides=(), **given) -> FinetuneRequest:
    """`dsrun finetune MODEL` with these options; None is as if it weren't there."""
    return FinetuneRequest(model, _asked(FinetuneOptions, {**given, "overrides": tuple(overrides)}))


def script_request(
    script: str = "train.py", args=(), overrides=(), again: bool = False, **given
) -> ScriptRequest:
    """`dsrun launch SCRIPT ARGS` with these options."""
    asked = _asked(LaunchOptions, {**given, "overrides": tuple(overrides)})
    return ScriptRequest(script, tuple(args), asked, again)


def _asked(options, given):
    said = {name: value for name, value in given.items() if value not in (None, ())}
    if options is FinetuneOptions and "train_file" in said and not isinstance(said["train_file"], tuple):
        said["train_file"] = (str(said["train_file"]),)
    return Resolved.by_user(options, said)
