"""The nursery: a process that imports torch and the user's code once and forks a child per trial.

Importing costs seconds and a forked trial a fraction of one. Nothing may touch CUDA before the
fork; where the user's code does, or the system cannot fork, the parent starts a fresh process for
each trial, which runs it in place of a child.

Run as `python -m memfit.trial.nursery DESCRIPTOR SECOND`, which are connected sockets. The second
is for a nursery that this one forks, so that two trials can run side by side.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import platform
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from memfit.errors import MemfitError, UsageError, WorkloadError
from memfit.records import Environment
from memfit.trial import lazy, libraries, worker
from memfit.trial.protocol import (
    OUTPUT,
    CardTaken,
    Channel,
    DescribeGpu,
    Double,
    Ended,
    Failed,
    Gpu,
    Load,
    Ready,
    RunTrial,
    Started,
)
from memfit.trial.stacks import dump_to
from memfit.virtual import CARD_VARIABLE, control
from memfit.workload import ImportedWorkload, LoadedWorkload, import_workload

_POLL_S = 0.005
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_MODULE_LOADING",
    "TORCH_CUDNN_V8_API_DISABLED",
    "OMP_NUM_THREADS",
)
"""The only environment variables that are ever recorded; all of them change memory."""


def main() -> NoReturn:
    """Serve the parent until it goes away."""
    channel, second = (Channel(socket.socket(fileno=int(word))) for word in sys.argv[1:])
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    no_torch = _import_torch()
    with contextlib.suppress(EOFError, BrokenPipeError):
        _serve(channel, second, no_torch)
    os._exit(0)


def _import_torch() -> ImportError | None:
    """Import torch, which needs no orders, and return why it cannot be imported."""
    gc.disable()  # imports make hundreds of thousands of objects and hardly any garbage
    try:
        if control.active():
            lazy.import_torch()
        else:
            importlib.import_module("torch")
    except ImportError as error:
        return error
    return None


def _serve(channel: Channel, second: Channel | None, no_torch: ImportError | None) -> None:
    imported: ImportedWorkload | None = None
    loaded: LoadedWorkload | None = None
    may_fork = True
    while True:
        match channel.receive(None):
            case Load() as request if not _takes_card(request.card):
                channel.send(CardTaken())
            case Load() if no_torch is not None:
                channel.send(
                    Failed(
                        blame="usage",
                        message=f"torch cannot be imported: {no_torch}",
                        hint="install torch in the environment of memfit",
                    )
                )
            case Load() as request:
                may_fork = request.may_fork
                imported, loaded = _load(channel, request, imported)
            case RunTrial() as request if loaded is not None:
                if may_fork:
                    _fork_trial(channel, second, loaded, request)
                else:
                    channel.send(Started(pid=os.getpid()))
                    _become_worker(loaded, request)
            case Double() if second is not None:
                channel, second = _fork_nursery(channel, second), None
            case DescribeGpu():
                _describe_gpu(channel)
            case _:
                return


def _takes_card(card: str | None) -> bool:
    """Set the card of the trials that follow; False when the user's code has seen another."""
    if card is None or card == os.environ.get(CARD_VARIABLE):
        return True
    if control.card_was_read():
        return False
    os.environ[CARD_VARIABLE] = card  # the driver reads it in the child, at the first CUDA call
    return True


def _load(
    channel: Channel, request: Load, imported: ImportedWorkload | None
) -> tuple[ImportedWorkload | None, LoadedWorkload | None]:
    try:
        if imported is None or imported.target != request.target:
            imported = _import(request)
        loaded = imported.with_parameters(request.parameters)
    except MemfitError as error:
        channel.send(
            Failed(
                blame="usage" if isinstance(error, UsageError) else "workload",
                message=error.message,
                hint=error.hint,
                details=error.details,
            )
        )
        return imported, None
    channel.send(
        Ready(workload=loaded.info, environment=_environment(), fork_refusal=_fork_refusal())
    )
    return imported, loaded


def _import(request: Load) -> ImportedWorkload:
    import torch  # noqa: PLC0415

    gc.disable()  # as while torch was imported
    # OpenMP does not survive a fork once it has started its threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if request.may_fork and control.active():
        lazy.install()
    else:
        lazy.import_kernels()
    _warm_up()
    try:
        imported = import_workload(request.target)
    except WorkloadError as error:
        if not lazy.kernel_was_missing(error):
            raise
        lazy.import_kernels()
        imported = import_workload(request.target)
    torch.set_num_threads(threads)
    _set_aside_what_was_imported()
    return imported


def _set_aside_what_was_imported() -> None:
    """Keep the collector from looking through it, in trials again and again and here even once.

    A full collection comes when a quarter as many objects are new as the last one has found. One
    of as many stand-ins leaves trials the threshold that a training program has after its imports.
    """
    imported, _, _ = gc.get_count()
    gc.freeze()
    gc.enable()
    stand_ins: list[list[None]] = [[] for _ in range(imported)]
    gc.collect()
    del stand_ins


def _warm_up() -> None:
    """Import what torch imports on first use, once here instead of once in every child."""
    import torch  # noqa: PLC0415

    # The first optimizer imports the compiler, where nothing stands in for it.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with torch.device("cpu"):  # imports what a default device takes
        pass


def _fork_refusal() -> str | None:
    import torch  # noqa: PLC0415

    if sys.platform != "linux":
        return f"forking is not safe on {platform.system()}"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "the workload's module uses CUDA while it is imported"
    return None


def _environment() -> Environment:
    import torch  # noqa: PLC0415

    from memfit import __version__  # noqa: PLC0415
    from memfit.devices.nvml import Nvml  # noqa: PLC0415

    return Environment(
        memfit=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        cudnn=_cudnn_version(),
        driver=None if control.active() else Nvml().driver_version(),
        variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )


def _cudnn_version() -> str | None:
    """Version of cuDNN, without `torch.backends.cudnn.version`, which starts CUDA."""
    import torch  # noqa: PLC0415

    bindings = getattr(torch._C, "_cudnn", None)  # noqa: SLF001
    if bindings is None:
        return None
    return ".".join(str(part) for part in bindings.getRuntimeVersion())


def _describe_gpu(channel: Channel) -> None:
    """Ask CUDA in a child, so that this process can still fork."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.write(writer, _gpu_facts())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    import msgspec  # noqa: PLC0415

    channel.send(
        msgspec.json.decode(text, type=Gpu)
        if text
        else Gpu(failure="CUDA crashed while it was asked for its device")
    )


def _gpu_facts() -> bytes:
    import msgspec  # noqa: PLC0415
    import torch  # noqa: PLC0415

    try:
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = Gpu(
            name=facts.name,
            total_bytes=facts.total_memory,
            compute_capability=f"{facts.major}.{facts.minor}",
            virtual=control.active(),
        )
    except (RuntimeError, AssertionError) as error:
        gpu = Gpu(failure=str(error).splitlines()[0])
    return msgspec.json.encode(gpu)


def _fork_nursery(channel: Channel, second: Channel) -> Channel:
    """Fork a nursery, and return the channel that this process serves from here on."""
    pid = os.fork()
    if pid == 0:
        channel.close()
        os.setpgid(0, 0)
        die_with_parent()
        return second
    with contextlib.suppress(OSError):  # whichever of the two comes first
        os.setpgid(pid, pid)
    second.close()
    channel.send(Started(pid=pid))
    return channel


def _fork_trial(
    channel: Channel, second: Channel | None, loaded: LoadedWorkload, request: RunTrial
) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            channel.close()
            if second is not None:
                second.close()
            os.setpgid(0, 0)
            die_with_parent()
            if control.active():
                lazy.end_instead_of_importing()
            _become_worker(loaded, request)
        finally:
            os._exit(70)
    with contextlib.suppress(OSError):  # whichever of the two comes first
        os.setpgid(pid, pid)
    try:
        channel.send(Started(pid=pid))
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                lazy.import_missing(code)
                opened = libraries.read_word(Path(request.folder)) if control.active() else ()
                channel.send(Ended(exit_code=code))
                libraries.open_now(opened)
                return
            channel.receive(_POLL_S)  # the parent says nothing now; its end raises EOFError
    except (EOFError, BrokenPipeError):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        raise


def _become_worker(loaded: LoadedWorkload, request: RunTrial) -> NoReturn:
    folder = Path(request.folder)
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    dump_to(output)
    _be_killed_first()
    worker.run(loaded, request.spec, folder, request.reads)


def _be_killed_first() -> None:
    """Have the kernel end the trial where the host runs out of memory, and nobody else for it.

    It weighs processes by what they have in memory, and the nursery has most of the libraries.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def die_with_parent() -> None:
    """Ask Linux for SIGKILL when the parent process ends, however it ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    main()
