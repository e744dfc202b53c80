"""A small workload that does what the file named by FAULT says, so that one nursery serves all."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import memfit


def fault() -> str:
    return Path(os.environ["FAULT"]).read_text()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        act("backward")
        return grad


def act(place: str) -> None:  # noqa: C901
    """Fail here if the fault says so: `PLACE:WHAT`."""
    where, _, what = fault().partition(":")
    if where != place:
        return
    if what == "raise":
        raise ValueError(f"raised in {place}")
    if what == "says-oom":
        raise ValueError("the user's own words: CUDA out of memory. Tried to allocate")
    if what == "memory-error":
        raise MemoryError
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        sys.exit(3)
    if what == "vanish":
        os._exit(3)
    if what == "hang":
        print("about to hang", flush=True)
        time.sleep(600)
    if what == "orphan":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["FAULT"]).with_suffix(".pid").write_text(str(child.pid))


class Faulty(memfit.Workload):
    def model(self):
        act("model")
        if fault() == "model:not-a-module":
            return "a model"
        if fault() == "model:frozen":
            return nn.Linear(8, 8).requires_grad_(False)
        return Unused() if fault() == "model:unused" else nn.Linear(8, 8)

    def batch(self, m):
        act("batch")
        return torch.ones(m + 1 if fault() == "batch:size" else m, 8)

    def loss(self, model, batch):
        act("loss")
        out = InBackward.apply(model(batch))
        match fault():
            case "loss:vector":
                return out
            case "loss:float":
                return 1.0
            case "loss:detached":
                return out.mean().detach()
            case "loss:nan":
                return out.mean() * float("nan")
            case "loss:infinite-gradient":
                return out.sub(out.detach()).abs().sqrt().sum()
        return out.square().mean()

    def optimizer(self, model):
        act("optimizer")
        if fault() == "optimizer:none":
            return None
        optimizer = super().optimizer(model)
        optimizer.register_step_pre_hook(lambda *_: act("step"))
        return optimizer
