"""Running the user's own loop under the watch: a script, or an object with `run_group(m, A)`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from memfit.errors import UsageError, WorkloadError
from memfit.verification import Finding, LoopSeen
from memfit.verify.events import Expected
from memfit.verify.judge import judge
from memfit.verify.worker.watch import Watch, watching
from memfit.workload import import_target, user_code, user_traceback

_GROUPS = 3
"""Groups that an object with `run_group` is asked for."""


def watch_script(
    path: str, arguments: Sequence[str], expected: Expected, seconds: float
) -> tuple[list[Finding], LoopSeen]:
    """Run a training script to its end, or until the time is up, and judge its loop.

    Raises:
        WorkloadError: When it fails, or no optimizer step was seen.
    """
    return _judge(run_watched(path, arguments, seconds), expected, path, seconds)


def run_watched(path: str, arguments: Sequence[str], seconds: float) -> Watch:
    """Run a training script under the watch, as its own program."""
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    with watching(seconds) as watch:
        _run(path, watch)
    return watch


def _run(path: str, watch: Watch) -> None:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise WorkloadError(f"{path} ended with exit status {end.code}") from None
    except Exception as error:
        if watch.unscaled_twice is None:
            raise WorkloadError(
                f"{path} failed: {type(error).__name__}: {error}", details=user_traceback(error)
            ) from error


def find_loop(target: str) -> Any | None:
    """Return the `run_group` that a target has: a function, a method, or an object's; or None."""
    module, name = import_target(target)
    if name is not None:
        owner = getattr(module, name, None)
        return _bound(owner) if owner is not None else None
    if callable(getattr(module, "run_group", None)):
        return module.run_group
    own = [
        value
        for value in vars(module).values()
        if hasattr(value, "run_group") and getattr(value, "__module__", None) == module.__name__
    ]
    return _bound(own[0]) if own else None


def _bound(owner: Any) -> Any | None:
    if not callable(getattr(owner, "run_group", None)):
        return None
    if isinstance(owner, type):
        with user_code(f"{owner.__name__} cannot be made"):
            owner = owner()
    return owner.run_group


def watch_groups(
    run_group: Any, microbatch: int, steps: int, *, seed: int, seconds: float, target: str
) -> tuple[list[Finding], LoopSeen]:
    """Run a few groups of the user's own and judge them."""
    torch.manual_seed(seed)
    with watching(seconds) as watch:
        try:
            for _ in range(_GROUPS):
                run_group(microbatch, steps)
        except Exception as error:
            if watch.unscaled_twice is None:
                raise WorkloadError(
                    f"run_group({microbatch}, {steps}) failed: {type(error).__name__}: {error}",
                    details=user_traceback(error),
                ) from error
    expected = Expected(microbatches=steps, logical_batch=microbatch * steps)
    return _judge(watch, expected, target, seconds)


def _judge(
    watch: Watch, expected: Expected, target: str, seconds: float
) -> tuple[list[Finding], LoopSeen]:
    kinds = {event.kind for event in watch.events}
    if not kinds >= {"backward", "step"} and watch.unscaled_twice is None:
        what = "optimizer step" if "backward" in kinds else "backward pass"
        hint = (
            "what steps has to be a torch.optim.Optimizer"
            if "backward" in kinds
            else "a training script trains when it is run; its words go after --"
        )
        within = f" within {seconds:g} s" if watch.ran_out else ""
        raise UsageError(
            f"no {what} was seen in {target}{within}",
            hint="--watch SECONDS gives it longer" if watch.ran_out else hint,
        )
    return judge(
        watch.events,
        expected=expected,
        ended="time" if watch.ran_out else "by itself",
        unscaled_twice=watch.unscaled_twice,
    )
