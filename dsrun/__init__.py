"""dsrun: the checker, the planner and the runner of DeepSpeed jobs.

`validate`, `plan`, `diagnose`, `explain` and `DsrunError` are its Python interface; every other name may move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsrun.api import diagnose, explain, plan, validate
    from dsrun.errors import DsrunError

__version__ = "0.1.0"
__all__ = ["DsrunError", "__version__", "diagnose", "explain", "plan", "validate"]


def __getattr__(name: str) -> Any:
    """The interface, imported at its first use: a command that needs none of it starts faster."""
    if name == "DsrunError":
        from dsrun.errors import DsrunError

        return DsrunError
    if name in __all__:
        from dsrun import api

        return getattr(api, name)
    raise AttributeError(f"module 'dsrun' has no attribute {name!r}")
