"""What each process did to the device is told, and watching it changes no byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.run.conftest import Desk

pytestmark = pytest.mark.virtual

MIB = 2**20
LAYER = 1024 * 1024 * 4
"""Bytes of one layer's parameters; every allocation below is a multiple of 512."""

TRAIN = """
    import json, torch
    model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    def train(groups):
        for _ in range(groups):
            model(torch.randn(64, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    train(2)
"""


def only(document: dict[str, Any]) -> dict[str, Any]:
    (process,) = document["processes"]
    return dict(process)


def phases(process: dict[str, Any], device: int = 0) -> dict[str, dict[str, int]]:
    return {phase["until"]: phase for phase in process["devices"][device]["phases"]}


def test_watching_changes_no_byte_and_tells_first_and_later_groups_apart(desk: Desk) -> None:
    code = f"""
    {TRAIN}
    stats = torch.cuda.memory_stats()
    stats = {{k: v for k, v in stats.items() if "duration" not in k}}
    print(json.dumps(stats, sort_keys=True))
    """
    alone = desk.without_observer(code)
    ended = desk.run(code, "--out", "run.json", "--json")
    watched, document = ended.err, ended.told
    assert alone in watched
    assert (desk.folder / "run.json").read_text() == ended.out

    process = only(document)
    assert (process["optimizer_steps"], process["optimizers"]) == (2, 1)
    assert (process["ending"], process["exit_status"]) == ("exit", 0)
    assert process["virtual"]
    assert document["source"] == "virtual"
    (device,) = process["devices"]
    seen = phases(process)
    assert list(seen) == ["first_step_begins", "first_step_ends", "end"]
    # Parameters and gradients before the first optimizer step; momentum from then on.
    resident = [
        seen[until]["allocated_bytes"] for until in ("first_step_begins", "first_step_ends")
    ]
    assert resident[1] - resident[0] == LAYER
    assert seen["end"]["peak_allocated_bytes"] - seen["first_step_begins"][
        "peak_allocated_bytes"
    ] == (LAYER)
    assert device["peak_allocated_bytes"] == seen["end"]["peak_allocated_bytes"]
    context = document["device"]["context_bytes"]
    assert device["device_used_bytes"] == device["peak_reserved_bytes"] + context


def test_a_peak_that_the_program_resets_or_frees_is_not_lost(desk: Desk) -> None:
    process = only(
        desk.told("""
        import torch
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        if hasattr(torch.accelerator, "reset_peak_memory_stats"):
            torch.accelerator.reset_peak_memory_stats()
        x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    """)
    )
    (device,) = process["devices"]
    assert device["peak_allocated_bytes"] == device["peak_reserved_bytes"] == 2**30
    assert device["device_used_bytes"] == 2**30 + 480 * MIB
    assert list(phases(process)) == ["end"]
    assert phases(process)["end"]["allocated_bytes"] == MIB


def test_running_out_of_memory_is_told_with_its_place(desk: Desk) -> None:
    code = """
    import torch
    try:
        torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        print("survived")
    class Costly(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.sum()
        @staticmethod
        def backward(context, gradient):
            return torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
    weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    optimizer = torch.optim.SGD([weight])
    weight.sum().backward()
    optimizer.step()
    Costly.apply(weight).backward()
    """
    ended = desk.run(code, "--memory-limit", "20GiB", "--out", "run.json")
    assert ended.code == 1
    assert ended.out == "survived\n"
    lines = ended.err.splitlines()
    said = [line.strip() for line in lines if line.startswith("  out of memory on virtual")]
    assert said == [
        "out of memory on virtual device 0 outside backward and optimizer steps, before any "
        "optimizer step: 100.00 GiB asked for, 19.53 GiB free, 0 B allocated",
        "out of memory on virtual device 0 in backward, after 1 optimizer step: 30.00 GiB asked "
        "for, 19.51 GiB free, 8.00 MiB allocated",
    ]
    assert any("ended by torch.OutOfMemoryError, exit status 1" in line for line in lines)


def test_a_process_that_is_killed_leaves_its_last_figures(desk: Desk) -> None:
    ended = desk.run(
        f"""
    {TRAIN}
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
    """,
        "--json",
    )
    process = only(ended.told)
    assert ended.code == 137
    assert (process["ending"], process["signal"], process["exit_status"]) == (
        "signal",
        "SIGKILL",
        None,
    )
    assert process["optimizer_steps"] == 2
    assert phases(process)["end"]["peak_allocated_bytes"] > 3 * LAYER
    assert any("was ended before it could say so" in limit for limit in ended.told["limits"])


def test_forks_and_data_loaders_are_processes_of_their_own(desk: Desk) -> None:
    document = desk.told("""
        import os, torch
        from torch.utils.data import DataLoader
        child = os.fork()
        if child == 0:
            torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        data = torch.utils.data.TensorDataset(torch.randn(64, 1024))
        loader = DataLoader(data, batch_size=16, num_workers=2, pin_memory=True)
        model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
        optimizer = torch.optim.SGD(model.parameters())
        for (x,) in loader:
            assert x.is_pinned()
            model(x.to("cuda", non_blocking=True)).sum().backward()
            optimizer.step()
    """)
    trainer, forked = document["processes"]
    assert (forked["exit_status"], forked["ending"]) == (9, "exit")
    assert forked["devices"][0]["peak_allocated_bytes"] == 3 * MIB
    assert forked["pid"] != trainer["pid"]
    assert (trainer["exit_status"], trainer["optimizer_steps"]) == (0, 4)
    assert any("2 processes used device 0" in limit for limit in document["limits"])


def test_a_compiled_optimizer_step_is_not_disturbed(desk: Desk) -> None:
    ended = desk.run(f"""
    {TRAIN}
    import torch._dynamo
    torch._dynamo.reset()
    @torch.compile(backend="eager", fullgraph=False)
    def step():
        optimizer.step()
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    step()
    breaks = torch._dynamo.utils.counters["graph_break"]
    print([text for text in breaks if "memfit" in text])
    """)
    assert (ended.code, ended.out) == (0, "[]\n")


def read_at(document: dict[str, Any]) -> str:
    return str(only(document)["reads"][0]["where"])


def test_values_that_nobody_computed_are_said_to_be_unknown(desk: Desk) -> None:
    document = desk.told(f"""
    {TRAIN}
    loss = model(torch.randn(64, 1024, device="cuda")).sum()
    print(loss.item(), loss.tolist())
    """)
    process = only(document)
    assert process["unknown_reads"] == 2
    assert process["reads"] == [{"where": read_at(document), "unknown": 2, "changed": 0}]
    assert read_at(document).endswith("train.py:14")
    assert any("read 2 values from the device" in limit for limit in document["limits"])
    assert any(f"({read_at(document)}, 2 times)" in limit for limit in document["limits"])


def test_known_values_on_the_device_steer_the_program_as_on_a_card(desk: Desk) -> None:
    document = desk.told("""
    import torch
    weight = torch.nn.Parameter(torch.zeros(1024, 1024, device="cuda"))
    rate = torch.tensor(1e-3, device="cuda")
    optimizer = torch.optim.AdamW([weight], lr=rate, capturable=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=1)
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 32
    lengths = torch.tensor([3, 0, 2], device="cuda")
    tokens = torch.arange(3, device="cuda")
    assert tokens[lengths > 0].shape[0] == 2
    done = torch.zeros((), dtype=torch.long, device="cuda")
    while done < 5:
        done += 1
    assert done.item() == 5
    """)
    process = only(document)
    assert (process["exit_status"], process["optimizer_steps"]) == (0, 2)
    assert process["unknown_reads"] == 0  # and whether a gradient overflowed may have changed


def test_what_the_history_of_lbfgs_would_still_take_is_said(desk: Desk) -> None:
    document = desk.told("""
    import torch
    model = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=10)
    inputs = torch.randn(8, 1024, device="cuda")
    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss
    for _ in range(3):
        optimizer.step(closure)
    """)
    process = only(document)
    assert (process["exit_status"], process["optimizer_steps"]) == (0, 3)
    assert process["history_bytes"] == 10 * 2 * 4 * MIB
    assert any("L-BFGS" in limit and "up to 80.0" in limit for limit in document["limits"])


def test_every_line_with_a_figure_says_that_it_is_virtual(desk: Desk) -> None:
    ended = desk.run(TRAIN)
    told = ended.err[ended.err.index("\n") + 1 :].partition("limits:")[0].splitlines()
    figures = [line for line in told if "iB" in line or "optimizer step" in line]
    assert len(figures) == 5
    assert all("virtual" in line for line in figures)
