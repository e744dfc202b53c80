"""A workload of two small layers, with which `memfit doctor` tries a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit.workload import Workload

if TYPE_CHECKING:
    import torch


class SelfTest(Workload):
    """Two small layers and AdamW."""

    def model(self) -> torch.nn.Module:
        """Build two layers."""
        from torch import nn  # noqa: PLC0415

        return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))

    def batch(self, m: int) -> torch.Tensor:
        """Make random vectors."""
        import torch  # noqa: PLC0415

        return torch.randn(m, 256, device=self.device)

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the output."""
        loss: torch.Tensor = model(batch).square().mean()
        return loss
