"""Verifications of this machine, by the digest of the workload's file: a probe looks here.

A file that was changed has another digest, so that what was verified is never taken for something
else. Nothing depends on the folder: without it, a workload was not verified.
"""

from __future__ import annotations

from pathlib import Path

from memfit.errors import CannotJudge, UsageError
from memfit.folder import write_whole
from memfit.records import WorkloadInfo, from_json, to_json
from memfit.verification import Verification
from memfit.virtual.build import cache_folder

_NAME_BYTES = 24


def keep(made: Verification) -> bool:
    """Keep a verification of a workload that lies in a file; return whether it could be kept."""
    if made.sha256 is None:
        return False
    try:
        path = _path(made.sha256, made.workload)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, to_json(made))
    except (CannotJudge, OSError):
        return False
    return True


def find(workload: WorkloadInfo) -> Verification | None:
    """Return the last verification of this very file, or None."""
    if workload.sha256 is None:
        return None
    try:
        path = _path(workload.sha256, workload.name)
        return from_json(path.read_bytes(), Verification, origin=str(path))
    except (CannotJudge, UsageError, OSError):
        return None


def _path(sha256: str, name: str) -> Path:
    return cache_folder() / "verified" / f"{sha256[:_NAME_BYTES]}-{name}.json"
