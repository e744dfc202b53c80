"""A small workload that does what the file named by FAULT says, so that one nursery serves all."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

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


SAID_BY_CUDA = {
    "illegal-access": "CUDA error: an illegal memory access was encountered",
    "device-assert": "CUDA error: device-side assert triggered",
    "no-kernel": "CUDA error: no kernel image is available for execution on the device",
    "bad-launch": "CUDA error: invalid configuration argument",
}
SAID_BY_TORCH = {
    "cudnn": "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if",
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "mig": 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1',
}


def limit_address_space() -> None:
    """Let the host refuse far less than is asked for, and leave room for telling so.

    A thread that passes a failure on takes a stack, and up to 64 MiB for an arena of malloc.
    """
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**31, resource.RLIM_INFINITY))


def fill_device() -> list[torch.Tensor]:
    """Leave next to nothing of what may be used on the device."""
    free, total = torch.cuda.mem_get_info()
    allowed = int(torch.cuda.get_per_process_memory_fraction() * total)
    room = min(free, allowed - torch.cuda.memory_reserved())
    return [torch.empty(room - 2**25, dtype=torch.uint8, device="cuda")]


def act(place: str) -> None:
    """Fail here if the fault says so: `PLACE:WHAT`."""
    where, _, what = fault().partition(":")
    if where == place:
        print(f"about to fail in {place}", flush=True)
        fail(place, what)


def fail(place: str, what: str) -> None:  # noqa: C901, PLR0912, PLR0915
    """Fail in the way that is asked for; an unknown one does nothing."""
    if what in SAID_BY_CUDA:
        raise getattr(torch, "AcceleratorError", RuntimeError)(SAID_BY_CUDA[what])
    if what in SAID_BY_TORCH:
        torch._check(False, lambda: SAID_BY_TORCH[what])
    if what == "cudnn-full":
        kept = fill_device()
        torch._check(not kept, lambda: SAID_BY_TORCH["cudnn"])
    if what == "says-runtime":
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if what == "device-oom":
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    if what == "wrapped-oom":
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            raise KeyError("the user's wrapper") from error
    if what == "host-oom":
        limit_address_space()
        torch.empty(1 << 34, dtype=torch.uint8, device="cpu")
    if what == "numpy-oom":
        limit_address_space()
        np.empty(1 << 34, dtype=np.uint8)
    if what == "index-limit":
        image = torch.empty(1, 8, 2**14, 2**14, dtype=torch.half, device="cuda")
        nn.functional.pad(image, (1, 1, 1, 1), mode="replicate")
    if what == "abort":
        os.abort()
    if what == "terminate":
        print("terminate called after throwing an instance of 'c10::Error'", file=sys.stderr)
        print("  what():  CUDA error: out of memory", file=sys.stderr, flush=True)
        os.abort()
    if what == "bus-error":
        os.kill(os.getpid(), signal.SIGBUS)
    if what == "wild-pointer":
        ctypes.string_at(8)
    if what == "eat":
        eaten = []
        while True:
            eaten.append(bytearray(b"x" * 2**20))
    if what == "raise":
        raise ValueError(f"raised in {place}")
    if what == "says-oom":
        raise ValueError("the user's own words: CUDA out of memory. Tried to allocate")
    if what == "memory-error":
        raise MemoryError
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
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


class Examples(Dataset[torch.Tensor]):
    """Examples that are made in a process of a DataLoader, and fail there."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        act("loader")
        return torch.ones(8)


class Faulty(memfit.Workload):
    """`later-` before a place is its second group, where the first had no fault."""

    def __init__(self, **parameters) -> None:
        super().__init__(**parameters)
        self.losses = 0
        self.steps = 0

    def model(self):
        act("model")
        if fault() == "model:not-a-module":
            return "a model"
        if fault() == "model:frozen":
            return nn.Linear(8, 8).requires_grad_(False)
        return Unused() if fault() == "model:unused" else nn.Linear(8, 8)

    def batch(self, m):
        act("batch")
        if fault().startswith("loader:"):
            return next(iter(DataLoader(Examples(), batch_size=m, num_workers=1)))
        if fault() == "batch:list":
            return [torch.ones(3, 8) for _ in range(m)]
        if fault() == "batch:lists":
            return [torch.ones(3, 8) for _ in range(m)], [{"label": torch.ones(3)}] * m
        if fault() == "batch:long-list":
            return [torch.ones(3, 8) for _ in range(m + 1)]
        return torch.ones(m + 1 if fault() == "batch:size" else m, 8)

    def loss(self, model, batch):
        act("loss")
        if not isinstance(batch, torch.Tensor):
            batch = torch.cat(list(batch) if isinstance(batch, list) else list(batch[0]))
        self.losses += 1
        if self.losses > 2:
            act("later-loss")
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
        if fault() == "optimizer:closure":
            return torch.optim.LBFGS(model.parameters())
        optimizer = super().optimizer(model)
        optimizer.register_step_pre_hook(self.stepping)
        return optimizer

    def stepping(self, *_) -> None:
        act("step")
        self.steps += 1
        if self.steps > 1:
            act("later-step")
