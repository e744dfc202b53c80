"""`memfit doctor`: what this machine can do, tried rather than assumed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from memfit.cli.manners import stdout, verb
from memfit.errors import CannotJudge, MemfitError
from memfit.records import DeviceKind, Split, TrialSpec, Verdict
from memfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memfit.devices.select import Choice
    from memfit.records import TrialResult
    from memfit.selftest import Part
    from memfit.virtual import Card

_ASK_CUDNN = """
import ctypes, sys
from memfit.virtual import control
library = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
library.cudnnGetVersion.restype = ctypes.c_size_t
print(library.cudnnGetVersion(), int(control.asks_cudnn()))
"""
"""Loads cuDNN as torch would, which takes far less time than importing torch."""
_BENDS_MEMORY = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Variables that change what PyTorch allocates."""
_CHILD_PATIENCE_S = 120


@verb
def doctor() -> None:
    """Say what this machine can do: torch, GPUs, the virtual GPU, and a trial on each."""
    choices = _look_around()
    works, differs = 0, None
    with ThreadPoolExecutor(max_workers=len(choices)) as pool:
        tries = [(choice, pool.submit(_try, choice)) for choice in choices]
        for choice, tried in tries:
            name = f"trial on {choice.slug}" if choice.card is None else "virtual GPU"
            try:
                result, words = tried.result()
            except MemfitError as error:
                _say(name, f"{error.message}" + (f" ({error.hint})" if error.hint else ""), "red")
                continue
            works += 1
            _say(name, words, "green")
            if choice.card is not None:
                said, differs = _compare(result)
                _say("self-test", said, "red" if differs else "green")
    if not works:
        raise CannotJudge("no trial ran on any device of this machine", hint="see the lines above")
    if differs is not None:
        raise CannotJudge(
            "the virtual GPU does not measure what was worked out: its figures cannot be trusted",
            hint=differs,
        )


def _say(name: str, text: str, style: str = "") -> None:
    from rich.text import Text  # noqa: PLC0415

    stdout().print(Text.assemble((f"{name:<14}", "dim"), (text, style)), soft_wrap=True)


def _look_around() -> list[Choice]:
    """Say what is here without trying it, and return the devices that can be tried."""
    from memfit import virtual  # noqa: PLC0415
    from memfit.devices.nvml import Nvml  # noqa: PLC0415
    from memfit.devices.select import Choice, torch_has_cuda  # noqa: PLC0415

    nvml = Nvml()
    _say("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    _say("torch", _torch_words(cuda=torch_has_cuda()))
    _say("compiler", shutil.which("cc") or "none (cc is needed once, for the virtual GPU)")
    for gpu in nvml.gpus():
        _say("GPU", f"{gpu.name}, {format_bytes(gpu.total_bytes)} (driver {nvml.driver_version()})")
    if not nvml.gpus():
        _say("GPU", "none")
    choices = [Choice(kind=DeviceKind.CPU, slug="cpu")]
    if nvml.gpus() and torch_has_cuda():
        choices.append(Choice(kind=DeviceKind.CUDA, slug="cuda"))
    reason = virtual.unavailable_reason()
    if reason is not None:
        _say("virtual GPU", f"not available: {reason}", "yellow")
        return choices
    card = virtual.find_card(virtual.DEFAULT_CARD)
    choices.append(Choice(kind=DeviceKind.VIRTUAL, slug=card.slug, card=card))
    with contextlib.suppress(MemfitError):  # the trial meets the same obstacle and tells it
        _say("driver", _driver_words())
        _say("cuDNN", _cudnn_words(card))
    return choices


def _torch_words(*, cuda: bool) -> str:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed (pip install torch)"
    return f"{version}, {'CUDA build' if cuda else 'CPU build'}"


def _driver_words() -> str:
    """Find the driver or build it, and say where it is and for which CUDA."""
    from memfit.virtual.build import cache_folder, driver_folder, find_torch  # noqa: PLC0415

    cache = cache_folder()
    before = set(cache.glob("driver-*"))
    folder = driver_folder()
    how = "found" if folder in {path.absolute() for path in before} else "built just now"
    torch = find_torch()
    assert torch is not None
    return f"{folder} ({how}, for CUDA {torch.cuda_major})"


def _cudnn_words(card: Card) -> str:
    """Ask in a process of its own whether the installed cuDNN plans for a virtual card."""
    from memfit import virtual  # noqa: PLC0415
    from memfit.virtual.build import find_torch  # noqa: PLC0415

    torch = find_torch()
    libraries = [] if torch is None else sorted(torch.site.glob("nvidia/*/lib/libcudnn.so.9"))
    if not libraries:
        return "no cuDNN 9 beside torch: the workspaces of convolutions are not counted"
    variables = virtual.prepare(card, total_bytes=card.total_bytes)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_CUDNN, str(libraries[0])],
            env={**os.environ, **variables},
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHILD_PATIENCE_S,
        )
        version, plans = (int(word) for word in done.stdout.split())
    except subprocess.TimeoutExpired:
        return f"did not answer in {_CHILD_PATIENCE_S} s"
    except ValueError:
        lines = done.stderr.strip().splitlines()
        return f"did not answer: {lines[-1] if lines else 'it said nothing'}"
    shown = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    if plans:
        return f"{shown} plans convolutions for virtual cards: workspaces are its own"
    return (
        f"{shown} cannot plan for a card that is not there (9.8 and later can): the workspaces "
        "of convolutions are not counted"
    )


def _compare(result: TrialResult) -> tuple[str, str | None]:
    """Compare the self-test's peaks with what they must be.

    Returns:
        A sentence, and what to do where they differ, else None.
    """
    from memfit.selftest import expected_forward, expected_peak  # noqa: PLC0415

    (device,) = result.devices
    forward = [
        phase.peak_allocated_bytes
        for phase in device.phases
        if phase.phase == "forward" and phase.groups == "first"
    ]
    said = []
    for name, parts, measured in (
        ("", expected_peak(), device.peak_allocated_bytes),
        (" in the forward pass", expected_forward(), forward[0] if forward else None),
    ):
        expected = sum(part.size_bytes for part in parts)
        if measured != expected:
            shown = "nothing" if measured is None else f"{measured:,}"
            return (
                f"{expected:,} bytes expected{name}, {shown} measured: {_sum_words(parts)}"
            ), _bent_words()
        said.append(f"{expected:,} bytes expected{name}, the same measured")
    return "; ".join(said), None


def _sum_words(parts: Sequence[Part]) -> str:
    return " + ".join(f"{part.size_bytes:,} {part.name}" for part in parts)


def _bent() -> list[str]:
    """Name the variables that are set here and change what PyTorch allocates."""
    return [name for name in _BENDS_MEMORY if os.environ.get(name)]


def _bent_words() -> str:
    bent = _bent()
    if not bent:
        return "please report this with the lines above"
    return f"{' and '.join(bent)} may be why: unset it and run doctor again"


def _try(choice: Choice) -> tuple[TrialResult, str]:
    """Run one small trial on a device, and say what it showed."""
    from memfit.devices.select import describe  # noqa: PLC0415
    from memfit.probe import worker_environment  # noqa: PLC0415
    from memfit.selftest import MICROBATCH  # noqa: PLC0415
    from memfit.trial.runner import TrialRunner  # noqa: PLC0415

    device = describe(choice, memory_limit=None) if choice.kind is not DeviceKind.CUDA else None
    with TrialRunner(
        "memfit.selftest",
        {},
        environment=worker_environment(choice, device),
        load_timeout_s=300,
    ) as runner:
        runner.open()
        if device is None:
            gpu = runner.describe_gpu()
            if gpu.failure is not None:
                raise CannotJudge(gpu.failure)
            facts = (gpu.name, gpu.total_bytes, gpu.compute_capability)
            device = describe(choice, memory_limit=None, gpu=facts)
        result = runner.run(
            TrialSpec(
                index=1,
                purpose="search",
                split=Split(microbatch=MICROBATCH, accumulation_steps=2),
                group_microbatches=2,
                device=device,
                timeout_s=300,
            )
        )
    if result.verdict is not Verdict.FITS:
        raise CannotJudge(f"a small trial ended with {result.verdict}: {result.evidence.text}")
    peak = format_bytes(result.peak_bytes or 0)
    named = "a virtual " + device.name if choice.card is not None else device.name
    took = format_seconds(result.wall_s)
    return result, f"works: a small trial on {named} took {took}, peak {peak}"
