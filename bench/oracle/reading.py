"""DeepSpeed's answer while it reads a config: DeepSpeedConfig, with the number of ranks made up."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import re
import traceback
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

ACCEPTED, REFUSED = "accepted", "refused"
PACKAGE = re.compile(r"(?:deepspeed|torch|pydantic)/.*")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a config. kind: accepted or refused; of training trained, failed, not finite, slow or unable.

    said: the exception's type and text. where: the line of DeepSpeed's that raised it, as file:function.
    """

    kind: str
    said: str = ""
    where: str = ""

    @property
    def text(self) -> str:
        return f"{self.said} ({self.where})" if self.where else self.said


def load() -> None:
    """Import DeepSpeed for the CPU, and hush its logger and the warnings of its models."""
    given = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed.runtime.config
        from deepspeed.accelerator import get_accelerator

        get_accelerator()
    finally:
        if given is None:
            del os.environ["DS_ACCELERATOR"]
        else:
            os.environ["DS_ACCELERATOR"] = given
    deepspeed.utils.logger.setLevel(logging.CRITICAL + 1)


def read(config: dict[str, Any], world_size: int) -> Outcome:
    """Let DeepSpeed read a config as a job of so many ranks would. `load` comes first."""
    from deepspeed.runtime import config as module

    real = module.dist
    module.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: world_size)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module.DeepSpeedConfig(copy.deepcopy(config))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return raised(REFUSED, error)
    finally:
        module.dist = real
    return Outcome(ACCEPTED)


def raised(kind: str, error: BaseException) -> Outcome:
    """The outcome of an exception."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/deepspeed/" in frame.filename]
    where = ""
    if frames:
        match = PACKAGE.search(frames[-1].filename[frames[-1].filename.rfind("site-packages") :])
        where = f"{match[0] if match else frames[-1].filename}:{frames[-1].name}"
    return Outcome(kind, f"{type(error).__name__}: {told(error)[:300]}", where)


def told(error: BaseException) -> str:
    """An exception's text on one line; of a pydantic error each field and what is wrong with it."""
    if type(error).__name__ == "ValidationError" and hasattr(error, "errors"):
        of_2 = hasattr(error, "error_count")  # pydantic 2; DeepSpeed before 0.15 uses pydantic.v1
        short = {"include_url": False, "include_input": False, "include_context": False}
        entries = error.errors(**short) if of_2 else error.errors()
        return "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in entries)
    return " ".join(str(error).split())
