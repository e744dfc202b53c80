"""Starting the nursery, with so few imports that it can be done before anything else.

`memfit probe` reads its command line and imports itself for about half a second before it knows
what to run. A nursery that is started ahead imports torch meanwhile; it has no workload and no card
yet, and is handed to whoever starts one in the same environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from memfit.devices.cores import cores
from memfit.virtual import CARD_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

_CORES_FOR_COMPILING = 8
"""Cores with which torch's compiler is left to start processes of its own."""
_OUTPUT_BYTES = 1 << 16
"""How much of what was printed last is read."""


class NurseryProcess:
    """A nursery's process, this end of its two channels, and what it prints."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Start one with exactly these environment variables."""
        self.channel, theirs = socket.socketpair()
        self.second, second = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this does
        self._printed = ""
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "memfit.trial.nursery"),
                *(str(theirs.fileno()), str(second.fileno())),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=variables,
            pass_fds=(theirs.fileno(), second.fileno()),
            start_new_session=True,
        )
        theirs.close()
        second.close()

    def output(self) -> str:
        """Return the end of what it has printed."""
        if self._output.closed:
            return self._printed
        file = self._output.fileno()
        start = max(os.fstat(file).st_size - _OUTPUT_BYTES, 0)
        return os.pread(file, _OUTPUT_BYTES, start).decode(errors="replace")

    def end(self, patience_s: float = 0.0) -> int:
        """Close the channels, end it with everything in its group, and return its exit code.

        Args:
            patience_s: How long it may take to end by itself.
        """
        self.channel.close()
        self.second.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self._printed = self.output()
        self._output.close()
        return code


_ahead: tuple[dict[str, str], NurseryProcess] | None = None


def start_ahead(environment: Mapping[str, str]) -> None:
    """Start a nursery for the first that `start` is asked for in this environment."""
    global _ahead  # noqa: PLW0603 - one per process, which has one command line
    variables = _variables(environment)
    _ahead = variables, NurseryProcess(variables)


def start(environment: Mapping[str, str]) -> NurseryProcess:
    """Start a nursery, or hand out the one that was started ahead.

    Args:
        environment: Variables added to this process's own, but for a virtual card's description:
            the nursery is told of that with the workload. One that was started ahead and has
            others is ended.
    """
    global _ahead
    variables = _variables(environment)
    ahead, _ahead = _ahead, None
    if ahead is not None:
        its_variables, started = ahead
        if its_variables == variables:
            return started
        started.end()
    return NurseryProcess(variables)


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    variables = {
        **_host_settings(),
        **os.environ,
        # torch must not start CUDA only to say whether there is a GPU.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Sets of strings in user code then have one order, and trials the same bytes.
        "PYTHONHASHSEED": "0",
        **environment,
    }
    variables.pop(CARD_VARIABLE, None)
    return variables


def _host_settings() -> dict[str, str]:
    """Settings of torch's host side that make trials quicker and change nothing on a device."""
    # Threads that spin while they wait make everything on a busy machine much slower.
    settings = {"OMP_WAIT_POLICY": "passive"}
    if cores() < _CORES_FOR_COMPILING:
        # Each trial would start processes that import torch before they compile anything.
        settings["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    return settings
