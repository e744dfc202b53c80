"""memfit finds the largest microbatch that really trains on a device.

These are the public names; importing them imports no torch, and `import memfit` none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.group import GroupOutcome, run_group
    from memfit.plan import Plan, load
    from memfit.workload import Workload

__version__ = "0.1.0"

__all__ = ["GroupOutcome", "Plan", "Workload", "__version__", "load", "run_group"]

_MODULES = {
    "GroupOutcome": "memfit.group",
    "Plan": "memfit.plan",
    "Workload": "memfit.workload",
    "load": "memfit.plan",
    "run_group": "memfit.group",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: the command line needs none of them."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return list(__all__)
