"""A loop over Accelerate, as its guides have it.

The one word is `mean`, for the loop of the first guide (`accelerator.accumulate`, whose backward
divides by the accumulation steps), or `counted`, for that of the guide on causal language models,
which divides the sum of the loss by the tokens of the whole group.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from accelerate import Accelerator
from torch.utils.data import DataLoader

from tests.verify.trainers.data import VOCABULARY, examples

STEPS = 4


def loss_of(model: Any, batch: Any, reduction: str) -> torch.Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction=reduction
    )


def mean(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch, "mean"))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def counted(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> None:
    batches = list(loader)
    for start in range(0, len(batches), STEPS):
        group = batches[start : start + STEPS]
        items = sum(int((b["labels"][:, 1:] != -100).sum()) for b in group)
        for batch in group:
            loss = loss_of(model, batch, "sum") / items
            accelerator.backward(loss * STEPS)  # backward divides by the accumulation steps
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 16), torch.nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data: Any = examples()
    loader: Any = DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    {"mean": mean, "counted": counted}[sys.argv[1]](accelerator, model, optimizer, loader)


if __name__ == "__main__":
    main()
