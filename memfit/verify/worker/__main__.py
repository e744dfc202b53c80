"""The process's own life: read the task, do it, leave the report."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from memfit.errors import MemfitError, UsageError
from memfit.trial.nursery import die_with_parent
from memfit.verify.findings import decide
from memfit.verify.protocol import REPORT, Failure, Report, Task, read_task, write
from memfit.verify.worker.subject import Subject
from memfit.verify.worker.workload import WorkloadCheck, accepted
from memfit.virtual import control
from memfit.workload import load, user_traceback


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
        _verify(read_task(folder), report, tell)
    except BaseException as error:  # noqa: BLE001 - whatever ends the check is its result
        report.failure = _failure(error)
    write(folder / REPORT, report)
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries may abort while they unload; the report is written, so nothing is left to run.
    os._exit(0)


def _verify(task: Task, report: Report, tell: Any) -> None:
    if task.device == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("torch finds no CUDA device", hint="use --device cpu")
        if control.active():
            raise UsageError(
                "the CUDA device here is virtual: its kernels compute nothing that could be "
                "compared",
                hint="use --device cpu, or a machine with a GPU",
            )
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    warnings.simplefilter("ignore")
    _verify_workload(task, report, tell)


def _verify_workload(task: Task, report: Report, tell: Any) -> None:
    tell(f"importing {task.target}")
    loaded = load(task.target, task.parameters)
    report.workload = loaded.info.name
    report.sha256 = loaded.info.sha256
    report.parameters = dict(loaded.info.parameters)
    report.logical_batch = task.logical_batch
    tell("building the model")
    subject = Subject(loaded, task.device, task.seed)
    assert task.logical_batch is not None
    checked = WorkloadCheck(subject, task.logical_batch, task.microbatch, tell).run()
    report.findings = accepted(checked.findings, task.accept)
    report.comparisons = checked.comparisons
    report.loss = checked.loss
    report.notes = checked.notes
    report.outcome = decide(report.findings, compared=bool(checked.comparisons))


def _failure(error: BaseException) -> Failure:
    if isinstance(error, MemfitError):
        return Failure(
            blame="usage" if isinstance(error, UsageError) else "workload",
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
