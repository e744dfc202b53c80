"""memfit finds the largest microbatch that really trains on a device.

These are the public names; importing them imports no torch.
"""

from memfit.group import GroupOutcome, run_group
from memfit.plan import Plan, load
from memfit.workload import Workload

__version__ = "0.1.0"

__all__ = ["GroupOutcome", "Plan", "Workload", "__version__", "load", "run_group"]
