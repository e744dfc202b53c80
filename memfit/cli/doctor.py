"""`memfit doctor`: what this machine can do, tried rather than assumed."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from typing import TYPE_CHECKING

from memfit.cli.manners import stdout, verb
from memfit.errors import CannotJudge, MemfitError
from memfit.records import DeviceKind, Split, TrialSpec, Verdict
from memfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memfit.devices.select import Choice


@verb
def doctor() -> None:
    """Say what this machine can do: torch, GPUs, the virtual GPU, and a trial on each."""
    from rich.text import Text  # noqa: PLC0415

    from memfit import virtual  # noqa: PLC0415
    from memfit.devices.nvml import Nvml  # noqa: PLC0415
    from memfit.devices.select import Choice, torch_has_cuda  # noqa: PLC0415

    console = stdout()

    def say(name: str, text: str, style: str = "") -> None:
        console.print(Text.assemble((f"{name:<14}", "dim"), (text, style)), soft_wrap=True)

    nvml = Nvml()
    say("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    say("torch", _torch_words(cuda=torch_has_cuda()))
    say("compiler", shutil.which("cc") or "none (cc is needed once, for the virtual GPU)")
    for gpu in nvml.gpus():
        say("GPU", f"{gpu.name}, {format_bytes(gpu.total_bytes)} (driver {nvml.driver_version()})")
    if not nvml.gpus():
        say("GPU", "none")
    works = 0
    choices = [Choice(kind=DeviceKind.CPU, slug="cpu")]
    if nvml.gpus() and torch_has_cuda():
        choices.append(Choice(kind=DeviceKind.CUDA, slug="cuda"))
    reason = virtual.unavailable_reason()
    if reason is None:
        card = virtual.find_card(virtual.DEFAULT_CARD)
        choices.append(Choice(kind=DeviceKind.VIRTUAL, slug=card.slug, card=card))
    else:
        say("virtual GPU", f"not available: {reason}", "yellow")
    for choice in choices:
        name = f"trial on {choice.slug}" if choice.card is None else "virtual GPU"
        try:
            say(name, _try(choice), "green")
            works += 1
        except MemfitError as error:
            say(name, f"{error.message}" + (f" ({error.hint})" if error.hint else ""), "red")
    if not works:
        raise CannotJudge("no trial ran on any device of this machine", hint="see the lines above")


def _torch_words(*, cuda: bool) -> str:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed (pip install torch)"
    return f"{version}, {'CUDA build' if cuda else 'CPU build'}"


def _try(choice: Choice) -> str:
    """Run one small trial on a device and say what it showed."""
    from memfit.devices.select import describe  # noqa: PLC0415
    from memfit.probe import worker_environment  # noqa: PLC0415
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
                split=Split(microbatch=8, accumulation_steps=2),
                group_microbatches=2,
                device=device,
                timeout_s=300,
            )
        )
    if result.verdict is not Verdict.FITS:
        raise CannotJudge(f"a small trial ended with {result.verdict}: {result.evidence.text}")
    peak = format_bytes(result.peak_bytes or 0)
    named = "a virtual " + device.name if choice.card is not None else device.name
    return f"works: a small trial on {named} took {format_seconds(result.wall_s)}, peak {peak}"
