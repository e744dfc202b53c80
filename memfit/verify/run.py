"""The parent's side: check the words, start the process that computes, and make the record."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from memfit import __version__
from memfit.devices.select import choose
from memfit.errors import CannotJudge, MemfitError, UsageError, WorkloadError
from memfit.verification import Verification
from memfit.verify.findings import find_page
from memfit.verify.protocol import OUTPUT, TASK, Failure, Report, Task, read_report, write
from memfit.verify.splits import DEFAULT_LOGICAL_BATCH, choose_splits, default_logical_batch
from memfit.virtual import find_card
from memfit.workload import split_target

_FOLDER = "memfit-verify-"
_OUTPUT_LINES = 20
_REAL = "use --device cpu, or cuda on a machine with a GPU"
_KILLED = "the host's memory may have run out: --set scales a workload down, and -B its batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """The question in the user's words; what is wrong with them ends in a UsageError."""

    target: str
    script: bool = False
    """Whether the target is a training script, to be run and watched."""
    arguments: Sequence[str] = ()
    """Words of the script."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    full_size: bool = False
    """Whether to leave out what the workload's `verify_with` makes smaller."""
    logical_batch: int | None = None
    microbatch: int | None = None
    replicas: int = 1
    device: str = "cpu"
    seed: int = 0
    accept: Sequence[str] = ()
    """Codes of findings that do not decide the answer."""
    watch_s: float = 120.0
    command: str = ""


def run_verify(request: VerifyRequest, tell: Callable[[str], None]) -> Verification:
    """Verify a workload or a loop, in a process of its own.

    Args:
        request: The question.
        tell: Told what is being done, in a few words.

    Raises:
        UsageError: When the question is wrong, or asks for a virtual GPU.
        WorkloadError: When the user's code fails, crashes or hangs.
        CannotJudge: When this machine has no such device.
    """
    started = time.monotonic()
    task = _task(request)
    report = _Process(task, tell).run()
    if report.failure is not None:
        raise _error(report.failure)
    return Verification(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=request.command,
        memfit=__version__,
        torch=report.torch,
        target=request.target,
        workload=report.workload,
        sha256=report.sha256,
        parameters=report.parameters,
        device=task.device,
        outcome=report.outcome,
        logical_batch=report.logical_batch,
        findings=tuple(report.findings),
        comparisons=tuple(report.comparisons),
        loss=report.loss,
        loop=report.loop,
        replicas=report.replicas,
        notes=tuple(report.notes),
        seed=request.seed,
        wall_s=time.monotonic() - started,
    )


def _task(request: VerifyRequest) -> Task:
    split_target(request.target)
    for code in request.accept:
        find_page(code)
    size = request.logical_batch
    if not request.script:
        if request.microbatch is not None and size is None:
            size = default_logical_batch(request.microbatch)
        choose_splits(DEFAULT_LOGICAL_BATCH if size is None else size, request.microbatch)
    if request.replicas < 1:
        raise UsageError(f"--replicas is {request.replicas}; it must be at least 1")
    if size is not None and size < request.replicas:
        raise UsageError(
            f"{size} examples do not go round {request.replicas} replicas",
            hint=f"the logical batch is at least {request.replicas} then",
        )
    return Task(
        target=request.target,
        kind="script" if request.script else "workload",
        parameters=dict(request.parameters),
        full_size=request.full_size,
        arguments=list(request.arguments),
        logical_batch=size,
        microbatch=request.microbatch,
        replicas=request.replicas,
        device=_device(request.device),
        seed=request.seed,
        accept=[code.upper() for code in request.accept],
        watch_s=request.watch_s,
    )


def _device(word: str) -> Literal["cpu", "cuda"]:
    plain = word.strip().lower()
    if plain in ("cpu", "auto"):
        return "cpu"
    try:
        if plain == "cuda":
            choose("cuda")
            return "cuda"
        find_card(word)
    except MemfitError as error:
        raise type(error)(error.message, hint=_REAL) from None
    raise UsageError(
        f"{word} is a virtual GPU: its kernels compute nothing, so there are no gradients to "
        "compare",
        hint=_REAL,
    )


def _error(failure: Failure) -> MemfitError:
    kinds = {"usage": UsageError, "workload": WorkloadError, "machine": CannotJudge}
    return kinds[failure.blame](failure.message, hint=failure.hint, details=failure.details)


class _Process:
    """The process that computes, from its start to its report."""

    def __init__(self, task: Task, tell: Callable[[str], None]) -> None:
        self._task = task
        self._tell = tell

    def run(self) -> Report:
        folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        try:
            write(folder / TASK, self._task)
            code = self._run_in(folder)
            report = read_report(folder)
            if report is not None:
                return report
            raise WorkloadError(
                f"the process that verifies {self._task.target} ended with {_exit_words(code)}",
                hint=_KILLED if code == -signal.SIGKILL else None,
                details=_tail(folder / OUTPUT),
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run_in(self, folder: Path) -> int:
        reader, writer = os.pipe()
        # Threads that spin while they wait make a busy machine several times slower.
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONHASHSEED": "0"}
        if self._task.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with (folder / OUTPUT).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "memfit.verify.worker", str(folder), str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(writer,),
                start_new_session=True,
            )
        os.close(writer)
        try:
            with os.fdopen(reader, "rb") as lines:
                for line in lines:
                    self._tell(line.decode(errors="replace").rstrip("\n"))
            return process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tail(path: Path) -> str | None:
    text = path.read_text(errors="replace").rstrip()
    return "\n".join(text.splitlines()[-_OUTPUT_LINES:]) or None


def _exit_words(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


__all__ = ["VerifyRequest", "run_verify"]
