"""Other finders on the same workloads; each is run as a process of its own by `peers`.

    python -m tests.benchmarks.finders lightning-power transformer --result FILE

The process has to be on a virtual GPU already (`memfit.virtual.prepare`). The finders get the
workload's own model, built on the device as a trial builds it (on the host, filling 124 million
parameters would cost them a second each time), its loss and optimizer, one example over and over,
and their own defaults. They write what they tried and what they answered; nothing about how they
search is changed.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.monotonic()

import torch  # noqa: E402 - the import is part of what is timed
from torch import Tensor  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from memfit.records import Precision  # noqa: E402
from memfit.workload import Workload, load  # noqa: E402
from tests.benchmarks.cases import CASES  # noqa: E402

ACCUMULATION_STEPS = 2
"""The least with which gradients are resident while a microbatch runs."""
GROUPS = 2
"""Groups in the accelerate user's own loop; the second runs with the optimizer's state."""
EXAMPLES = 100_000
"""Far more than any size that is tried, so that the data never limits the search."""


class Tally:
    """What a finder tried."""

    def __init__(self) -> None:
        self.trials: list[dict[str, Any]] = []
        self.examples = 0
        self.ready_s: float | None = None

    def ready(self) -> None:
        """Note that everything is imported and the finder's own work begins."""
        self.ready_s = time.monotonic() - STARTED

    def trial(self, size: int, run: Callable[[], Any]) -> Any:
        """Run one trial and note how it went."""
        entry: dict[str, Any] = {"size": size, "fits": False, "wall_s": 0.0}
        self.trials.append(entry)
        began = time.monotonic()
        try:
            value = run()
            entry["fits"] = True
        finally:
            entry["wall_s"] = time.monotonic() - began
        return value


class Rows(Dataset[Any]):
    """One example, over and over."""

    def __init__(self, workload: Workload) -> None:
        self.row = tree_map(lambda tensor: tensor[0], workload.batch(1))

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.row


def examples_in(batch: Any) -> int:
    """Count the examples of a microbatch."""
    return int(tree_leaves(batch)[0].shape[0])


LIGHTNING: dict[Precision, Any] = {
    Precision.FP32: "32-true",
    Precision.BF16: "bf16-mixed",
    Precision.FP16: "16-mixed",
}
ACCELERATE = {Precision.FP32: "no", Precision.BF16: "bf16", Precision.FP16: "fp16"}


def lightning(
    workload: Workload, precision: Precision, tally: Tally, *, folder: Path, **how: Any
) -> int | None:
    """Ask Lightning's tuner, with its defaults but for what `how` holds."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.tuner import Tuner, batch_size_scaling

    tally.ready()

    class Module(LightningModule):  # type: ignore[misc, unused-ignore]
        """The workload as Lightning wants it."""

        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.model: torch.nn.Module | None = None

        def configure_model(self) -> None:
            if self.model is None:  # on the device already, as the trainer calls this
                self.model = workload.model()

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Rows(workload), batch_size=self.batch_size)

        def training_step(self, batch: Any, _index: int) -> Tensor:
            tally.examples += examples_in(batch)
            return workload.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return workload.optimizer(self)

    module = Module()
    run_loop = batch_size_scaling._try_loop_run

    def counted(trainer: Any, params: Any) -> None:
        tally.trial(module.batch_size, lambda: run_loop(trainer, params))

    batch_size_scaling._try_loop_run = counted
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        precision=LIGHTNING[precision],
        accumulate_grad_batches=ACCUMULATION_STEPS,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    answer: int | None = Tuner(trainer).scale_batch_size(module, **how)
    return answer


def accelerate(workload: Workload, precision: Precision, tally: Tally, **how: Any) -> int:
    """Ask accelerate's decorator around a user's own loop, as its examples write it."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    tally.ready()
    accelerator = Accelerator(
        mixed_precision=ACCELERATE[precision], gradient_accumulation_steps=ACCUMULATION_STEPS
    )

    def train(batch_size: int) -> int:
        accelerator.free_memory()
        with accelerator.device:
            model = workload.model()
        optimizer = workload.optimizer(model)
        loader = DataLoader(Rows(workload), batch_size=batch_size)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        model.train()
        for index, batch in enumerate(loader):
            if index == GROUPS * ACCUMULATION_STEPS:
                break
            with accelerator.accumulate(model):
                tally.examples += examples_in(batch)
                loss = workload.loss(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return batch_size

    @find_executable_batch_size(**how)  # type: ignore[untyped-decorator, unused-ignore]
    def search(batch_size: int) -> int:
        size: int = tally.trial(batch_size, lambda: train(batch_size))
        return size

    answer: int = search()
    return answer


FINDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lightning-power": ("lightning", {"mode": "power"}),
    "lightning-binsearch": ("lightning", {"mode": "binsearch"}),
    "accelerate": ("accelerate", {}),
}


def ask(
    finder: str, workload: Workload, precision: Precision, tally: Tally, folder: Path
) -> int | None:
    """Ask one finder."""
    library, how = FINDERS[finder]
    if library == "lightning":
        return lightning(workload, precision, tally, folder=folder, **how)
    return accelerate(workload, precision, tally, **how)


def main() -> None:
    """Run one finder and write what it did."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.finders")
    parser.add_argument("finder", choices=FINDERS)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--result", type=Path, required=True)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    case = CASES[asked.case]
    workload = load(case.target, case.parameters).make()
    tally = Tally()
    failure: str | None = None
    answer: int | None = None
    try:
        answer = ask(asked.finder, workload, case.precision, tally, asked.result.parent)
    except Exception as error:  # noqa: BLE001 - a finder that fails has a result too
        failure = f"{type(error).__name__}: {error}"
    asked.result.write_text(
        json.dumps(
            {
                "answer": answer,
                "failure": failure,
                "trials": tally.trials,
                "examples": tally.examples,
                "device": torch.cuda.get_device_name(),
                "total_bytes": torch.cuda.get_device_properties(0).total_memory,
                "ready_s": tally.ready_s,
                "ended_s": time.monotonic() - STARTED,
            }
        )
    )


if __name__ == "__main__":
    main()
