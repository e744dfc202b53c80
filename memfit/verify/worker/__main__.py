"""The process's own life: read the task, do it, leave the report."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import msgspec
import torch

from memfit.errors import CannotJudge, MemfitError, UsageError, WorkloadError
from memfit.trial.nursery import die_with_parent
from memfit.verification import Finding
from memfit.verify.events import Expected
from memfit.verify.findings import decide
from memfit.verify.protocol import REPORT, TASK, Failure, Report, Task, read_task, write
from memfit.verify.splits import default_logical_batch
from memfit.verify.worker.loops import find_loop, watch_groups, watch_script
from memfit.verify.worker.replicas import start_replicas
from memfit.verify.worker.subject import Subject
from memfit.verify.worker.workload import WorkloadCheck, accepted
from memfit.virtual import control
from memfit.workload import import_workload, user_traceback


def main() -> None:
    """Do the task that lies in the folder."""
    folder, pipe = Path(sys.argv[1]), int(sys.argv[2])
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends

    def tell(sentence: str) -> None:
        with contextlib.suppress(OSError):
            os.write(pipe, f"{sentence}\n".encode())

    report = Report(torch=str(torch.__version__))
    try:
        _verify(read_task(folder), folder, report, tell)
    except BaseException as error:  # noqa: BLE001 - whatever ends the check is its result
        report.failure = _failure(error)
    write(folder / REPORT, report)
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries may abort while they unload; the report is written, so nothing is left to run.
    os._exit(0)


def _verify(task: Task, folder: Path, report: Report, tell: Any) -> None:
    if task.device == "cuda":
        if not torch.cuda.is_available():
            raise CannotJudge("torch finds no CUDA device", hint="use --device cpu")
        if control.active():
            raise UsageError(
                "the CUDA device here is virtual: its kernels compute nothing that could be "
                "compared",
                hint="use --device cpu, or a machine with a GPU",
            )
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    warnings.simplefilter("ignore")
    if task.kind == "script" and task.replicas > 1:
        _watch_replicas(task, folder, report, tell)
    elif task.kind == "script":
        _watch_script(task, report, tell)
    else:
        _verify_workload(task, folder, report, tell)


def _watch_replicas(task: Task, folder: Path, report: Report, tell: Any) -> None:
    tell(f"running {task.target} in {task.replicas} processes for up to {task.watch_s:g} s")
    report.workload = Path(task.target).name
    ranks = start_replicas(task, folder, frozen=[])
    report.loop = ranks.loop
    report.findings = accepted(ranks.findings, task.accept)
    report.outcome = decide(report.findings, compared=ranks.loop is not None)


def _watch_script(task: Task, report: Report, tell: Any) -> None:
    tell(f"running {task.target} for up to {task.watch_s:g} s")
    report.workload = Path(task.target).name
    report.sha256 = hashlib.sha256(Path(task.target).read_bytes()).hexdigest()
    steps = None
    if task.logical_batch is not None and task.microbatch is not None:
        steps = -(-task.logical_batch // task.microbatch)
    found, report.loop = watch_script(
        task.target,
        task.arguments,
        Expected(microbatches=steps, logical_batch=task.logical_batch),
        task.watch_s,
    )
    report.findings = accepted(found, task.accept)
    report.outcome = decide(report.findings, compared=report.loop.group_count > 0)


def _verify_workload(task: Task, folder: Path, report: Report, tell: Any) -> None:
    tell(f"importing {task.target}")
    run_group = find_loop(task.target)
    found: list[Finding] = []
    if run_group is not None:
        size = task.logical_batch or default_logical_batch(task.microbatch)
        microbatch = task.microbatch or max(1, size // 4)
        steps = -(-size // microbatch)
        tell(f"watching run_group({microbatch}, {steps})")
        found, report.loop = watch_groups(
            run_group,
            microbatch,
            steps,
            seed=task.seed,
            seconds=task.watch_s,
            target=task.target,
        )
    try:
        imported = import_workload(task.target)
        small = {} if task.full_size else imported.small()
        parameters = {**small, **task.parameters}
        loaded = imported.with_parameters(parameters)
    except UsageError:
        if run_group is None:
            raise
        report.workload = task.target
        report.findings = accepted(found, task.accept)
        report.outcome = decide(report.findings, compared=True)
        return
    report.workload = loaded.info.name
    report.sha256 = loaded.info.sha256
    report.parameters = dict(loaded.info.parameters)
    taken = [f"{name}={value}" for name, value in small.items() if name not in task.parameters]
    scaled = (
        f"made smaller as its verify_with says: {', '.join(taken)}; --full-size leaves it whole"
    )
    tell(f"building the model, {scaled}" if taken else "building the model")
    try:
        subject = Subject(loaded, task.device, task.seed)
    except WorkloadError as error:
        raise WorkloadError(
            error.message,
            hint=error.hint or (f"it was {scaled}" if taken else None),
            details=error.details,
        ) from None
    checked = WorkloadCheck(
        subject, task.logical_batch, task.microbatch, tell, fewest=task.replicas + 1
    ).run()
    report.logical_batch = checked.logical_batch
    found += checked.findings
    if task.replicas > 1:
        tell(f"{task.replicas} replicas over gloo")
        same = msgspec.structs.replace(
            task, logical_batch=checked.logical_batch, parameters=parameters
        )
        write(folder / TASK, same)
        ranks = start_replicas(task, folder, frozen=frozen_names(subject))
        report.replicas = ranks.check
        found += ranks.findings
    report.findings = accepted(found, task.accept)
    report.comparisons = checked.comparisons
    report.loss = checked.loss
    report.notes = [*([f"the workload was {scaled}"] if taken else []), *checked.notes]
    report.outcome = decide(report.findings, compared=bool(checked.comparisons))


def frozen_names(subject: Subject) -> list[str]:
    """Return the names of the modules that are held in eval mode."""
    return [n for n, m in subject.model.named_modules() if m in subject.frozen]


def _failure(error: BaseException) -> Failure:
    if isinstance(error, MemfitError):
        blames: dict[type, Any] = {UsageError: "usage", CannotJudge: "machine"}
        return Failure(
            blame=blames.get(type(error), "workload"),
            message=error.message,
            hint=error.hint,
            details=error.details,
        )
    return Failure(
        blame="workload",
        message=f"the check ended with {type(error).__name__}: {error}",
        details=user_traceback(error),
    )


if __name__ == "__main__":
    main()
