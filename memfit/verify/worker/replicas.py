"""Starting the replicas: real processes under torchrun that talk over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from memfit.errors import WorkloadError
from memfit.verify.protocol import Task
from memfit.verify.worker.replica import FROZEN, RESULT, Ranks

_START_S = 300.0
"""What starting and comparing may take beside the watching itself."""
_LINES = 15


def start_replicas(task: Task, folder: Path, *, frozen: Sequence[str]) -> Ranks:
    """Run the task in its replicas and return what they found.

    Args:
        task: The task; it lies in the folder.
        folder: Where the replicas leave their result.
        frozen: Names of the modules whose batch statistics are held still.

    Raises:
        WorkloadError: When a replica fails or hangs.
    """
    (folder / FROZEN).write_bytes(msgspec.json.encode(list(frozen)))
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(task.replicas), "-m", "memfit.verify.worker.replica", str(folder),
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            words,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_START_S + task.watch_s,
        )
    except subprocess.TimeoutExpired:
        raise WorkloadError(
            f"{task.replicas} replicas had not ended after {_START_S + task.watch_s:.0f} s",
            hint="a collective that not all replicas join waits for ever",
        ) from None
    failed = folder / f"{RESULT}.failed"
    if failed.exists():
        ranks = msgspec.json.decode(failed.read_bytes(), type=Ranks)
        raise WorkloadError(f"a replica failed: {ranks.failure}", details=ranks.details)
    if not (folder / RESULT).exists():
        tail = "\n".join((done.stdout + done.stderr).rstrip().splitlines()[-_LINES:])
        raise WorkloadError(f"the replicas ended with exit status {done.returncode}", details=tail)
    return msgspec.json.decode((folder / RESULT).read_bytes(), type=Ranks)
