"""One layer whose trial at one size does what the file named by GATE says: `SIZE:WHAT`.

`hang` waits for the end with `reached` beside the file once it does; `kill` ends the worker as the
kernel would.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import memfit


class Gated(memfit.Workload):
    """A layer behind a gate."""

    width: int = 8

    def model(self) -> nn.Module:
        return nn.Linear(self.width, 1)

    def batch(self, m: int) -> torch.Tensor:
        return torch.ones(m, self.width)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        gate = Path(os.environ["GATE"])
        size, _, what = gate.read_text().partition(":")
        if what and len(batch) == int(size):
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            gate.with_suffix(".reached").touch()
            time.sleep(600)
        out: torch.Tensor = model(batch).square().mean()
        return out
