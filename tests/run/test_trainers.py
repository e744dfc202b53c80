"""Trainers that nobody changed."""

from __future__ import annotations

import pytest

from tests.run.conftest import Desk
from tests.run.test_peaks import MIB, only, phases

pytestmark = pytest.mark.virtual

TRANSFORMERS = """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Tokens(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            ids = torch.randint(0, 1000, (128,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "labels": ids.clone()}

    config = GPT2Config(vocab_size=1000, n_positions=128, n_embd=256, n_layer=4, n_head=4)
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_steps=6, bf16=True, report_to=[], save_strategy="no", dataloader_num_workers=1,
    )
    model = GPT2LMHeadModel(config)
    Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
    print("parameters", sum(p.numel() for p in model.parameters()))
    print("peak", torch.cuda.max_memory_allocated())
"""


def test_a_transformers_trainer_script_runs_unmodified(desk: Desk) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ended = desk.run(TRANSFORMERS, "--out", "run.json", "--json", HF_HUB_OFFLINE="1")
    assert ended.code == 0, ended.err
    process = only(ended.told)
    assert process["optimizer_steps"] == 6
    seen = phases(process)
    assert f"peak {seen['end']['peak_allocated_bytes']}" in ended.err
    parameters = 4 * int(ended.err.partition("parameters ")[2].split()[0])
    # AdamW's two moments come with the first optimizer step, and stay.
    state = (
        seen["first_step_ends"]["allocated_bytes"] - seen["first_step_begins"]["allocated_bytes"]
    )
    assert 2 * parameters <= state <= 2.1 * parameters
    assert seen["end"]["peak_allocated_bytes"] > 4 * parameters


ACCELERATE = """
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator()
    model = torch.nn.Linear(2048, 2048, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        loss = model(torch.randn(4, 2048, device=accelerator.device)).sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_accelerate_launch_starts_two_ranks(desk: Desk) -> None:
    pytest.importorskip("accelerate")
    launcher = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
    document = desk.told(ACCELERATE, "--devices", "2", launcher=launcher)
    assert document["exit_status"] == 0
    first, second = document["processes"]
    assert [(p["rank"], p["world_size"], p["optimizer_steps"]) for p in (first, second)] == [
        (0, 2, 3),
        (1, 2, 3),
    ]
    # Parameters, gradients, buckets: 16 MiB each at the least, before any momentum.
    for process in (first, second):
        seen = phases(process, 0)
        assert seen["first_step_begins"]["allocated_bytes"] >= 3 * 16 * MIB
        assert [device["device"] for device in process["devices"]] == [process["rank"]]
