"""One of the real data-parallel processes that torchrun starts: a replica with its share.

Run as `torchrun --nproc-per-node D -m memfit.verify.worker.replica FOLDER`; rank 0 leaves what was
found in the folder.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from memfit.trial.checks import check_model
from memfit.trial.nursery import die_with_parent
from memfit.verification import Finding, LoopSeen, ReplicaCheck
from memfit.verify.across import over_replicas
from memfit.verify.events import Event, Expected
from memfit.verify.findings import finding
from memfit.verify.judge import judge
from memfit.verify.protocol import Task, read_task
from memfit.verify.tolerance import UNIT_ROUNDOFF, tolerance
from memfit.verify.worker import places
from memfit.verify.worker.equality import in_float64
from memfit.verify.worker.examples import Splitter
from memfit.verify.worker.gradients import Gradient, difference, norm
from memfit.verify.worker.loops import run_watched
from memfit.verify.worker.randomness import Draws
from memfit.verify.worker.subject import NoStep, Subject
from memfit.verify.worker.watch import Watch
from memfit.workload import load, user_traceback

RESULT = "replicas.json"
FROZEN = "frozen.json"
_SAME = 1e-6


class Ranks(msgspec.Struct, kw_only=True):
    """What the replicas leave behind."""

    check: ReplicaCheck | None = None
    findings: list[Finding] = []
    loop: LoopSeen | None = None
    failure: str | None = None
    details: str | None = None


def main() -> None:
    """Be one replica."""
    die_with_parent()
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    task = read_task(folder)
    try:
        if task.kind == "script":
            result = _watch(task, folder)
        else:
            dist.init_process_group("gloo")
            result = _compare(task, folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told by the parent
        result = Ranks(
            failure=f"{type(error).__name__}: {error}".splitlines()[0],
            details=user_traceback(error),
        )
        (folder / f"{RESULT}.failed").write_bytes(msgspec.json.encode(result))
        sys.stdout.flush()
        os._exit(1)
    if result is not None:
        (folder / RESULT).write_bytes(msgspec.json.encode(result))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)


# -- a workload ------------------------------------------------------------------------------


def _compare(task: Task, folder: Path) -> Ranks | None:
    """Compare the gradient over all replicas with the physical batch, with and without `D`."""
    rank, replicas = dist.get_rank(), dist.get_world_size()
    subject = Subject(load(task.target, task.parameters), "cpu", task.seed)
    size = task.logical_batch or 0
    batch = subject.batch(size)
    splitter = Splitter(batch, size, subject.batch(size - 1), size - 1)
    names = set(msgspec.json.decode((folder / FROZEN).read_bytes(), type=list[str]))
    subject.frozen = frozenset(m for n, m in subject.model.named_modules() if n in names)
    dtype = "float32" if in_float64(subject, batch) is None else "float64"
    subject.use(torch.float32)
    with Draws(still=True):
        rough, _ = subject.physical(batch)
    subject.use(torch.float64 if dtype == "float64" else torch.float32)
    with Draws(still=True):
        whole, _ = subject.physical(batch)
    scale = norm(whole) or 1.0
    noise = difference(rough, whole, scale).worst_error / UNIT_ROUNDOFF["float32"]
    limit = tolerance(dtype, terms=10**6, amplification=noise)

    sizes = _shares(size, replicas)
    start = sum(sizes[:rank])
    parts, parts_sizes = _halves(splitter, batch, start, sizes[rank])
    counts = subject.counts(parts, parts_sizes)
    own = torch.tensor([0] * replicas)
    own[rank] = sum(counts)
    dist.all_reduce(own)
    total = int(own.sum())
    subject.reset()
    mesh = init_device_mesh("cpu", (replicas,))
    made = subject.workload.parallelize(subject.model, mesh)
    subject.wrapped = check_model(made, made_by="parallelize()")

    def group(optimizer: Any, factor: int, over: int | None) -> Gradient:
        with Draws(still=True):
            made = subject.accumulated(parts, counts, optimizer, replicas=factor, total=over)
        return made.gradient

    right = group(NoStep(), replicas, total)
    without = group(NoStep(), 1, total)
    means = group(NoStep(), 1, None)
    group(subject.optimizer(), replicas, total)
    apart = _parameters_apart(subject.model)
    check = ReplicaCheck(
        replicas=replicas,
        counts=tuple(int(c) for c in own),
        error=difference(right, whole, scale).error,
        tolerance=limit,
        ratio_without=norm(without) / scale,
        error_mean_of_means=difference(means, whole, scale).error,
    )
    if rank:
        return None
    place = places.of_method(type(subject.workload), "parallelize")
    return Ranks(check=check, findings=_judge(check, right, scale, apart, place))


def _judge(
    check: ReplicaCheck, right: Gradient, scale: float, apart: float, place: Any
) -> list[Finding]:
    found = []
    if not check.error <= check.tolerance:
        found.append(
            finding(
                "MF703",
                f"Over {check.replicas} replicas with the factor D, the gradient has "
                f"{norm(right) / scale:.4g} times the norm of the batch's and is off by "
                f"{check.error:.2g} (tolerance {check.tolerance:.1g}).",
                place=place,
            )
        )
    if apart > _SAME:
        found.append(
            finding(
                "MF704",
                f"After one optimizer step the replicas' parameters differ by {apart:.2g} of "
                "their norm.",
                place=place,
            )
        )
    return found


def _shares(size: int, replicas: int) -> list[int]:
    base, larger = divmod(size, replicas)
    return [base + 1] * larger + [base] * (replicas - larger)


def _halves(splitter: Splitter, batch: Any, start: int, size: int) -> tuple[list[Any], list[int]]:
    """Cut a replica's share into two microbatches, where it has two examples."""
    first = (size + 1) // 2
    sizes = [first, size - first] if size > 1 else [size]
    parts = []
    for one in sizes:
        parts.append(splitter.take(batch, start, start + one))
        start += one
    return parts, sizes


def _parameters_apart(model: torch.nn.Module) -> float:
    """Return the largest difference of the replicas' parameters, relative to their norm."""
    worst = 0.0
    for parameter in model.parameters():
        low, high = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        size = float(parameter.detach().norm()) or 1.0
        worst = max(worst, float((high - low).norm()) / size)
    return worst


# -- a script --------------------------------------------------------------------------------


class _Seen(msgspec.Struct, kw_only=True):
    """What one rank saw of its script."""

    events: list[Event]
    ended: str
    checksum: float | None


def _watch(task: Task, folder: Path) -> Ranks | None:
    """Watch the script in this rank, and judge what all ranks saw."""
    rank, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    watch = run_watched(task.target, task.arguments, task.watch_s)
    seen = _Seen(
        events=watch.events,
        ended="time" if watch.ran_out else "by itself",
        checksum=_checksum(watch),
    )
    path = folder / f"rank-{rank}.json"
    path.with_suffix(".partial").write_bytes(msgspec.json.encode(seen))
    path.with_suffix(".partial").rename(path)
    if rank:
        return None
    ranks = [_read(folder / f"rank-{r}.json", task.watch_s) for r in range(replicas)]
    steps, share = None, None
    if task.logical_batch is not None:
        share = task.logical_batch // replicas
        if task.microbatch is not None:
            steps = -(-task.logical_batch // (task.microbatch * replicas))
    found, loop = judge(
        watch.events,
        expected=Expected(microbatches=steps, logical_batch=share),
        ended=seen.ended,  # type: ignore[arg-type]
        unscaled_twice=watch.unscaled_twice,
    )
    found += over_replicas([r.events for r in ranks], [r.checksum for r in ranks], found)
    return Ranks(findings=found, loop=loop)


def _read(path: Path, seconds: float) -> _Seen:
    import time  # noqa: PLC0415

    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.stem} did not end")
        time.sleep(0.05)
    return msgspec.json.decode(path.read_bytes(), type=_Seen)


def _checksum(watch: Watch) -> float | None:
    norms = [float(p.detach().double().norm()) for p in watch.parameters()]
    return math.fsum(norms) if norms else None


if __name__ == "__main__":
    main()
