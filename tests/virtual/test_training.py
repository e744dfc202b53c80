"""PyTorch trains on the virtual GPU: its own kernels' shapes, its own allocator, no kernel run."""

from __future__ import annotations

import re

import pytest

from memfit.virtual import find_card
from tests.virtual.scripts import CONVOLUTIONS, LINEAR, PRELUDE, TRANSFORMER

pytestmark = pytest.mark.virtual

KIB, MIB = 2**10, 2**20
WORKSPACE = 8_519_680
"""What PyTorch gives cuBLAS for each handle and stream before Hopper."""
LARGE_WORKSPACE = 32 * MIB


def test_a_linear_step_takes_weights_gradients_states_and_two_workspaces(on_card):
    allocated, _ = on_card(LINEAR + "print(json.dumps(peaks()))")
    weight, bias, batch = 4 * MIB, 4 * KIB, 256 * KIB
    held = 4 * (weight + bias) + 2 * WORKSPACE  # weights, gradients, two states
    assert held <= allocated <= held + weight + 4 * batch  # and the step's own temporaries


def test_reserved_memory_is_what_a_real_hopper_card_showed(on_card):
    # shreyansh26/MLSys-Experiments, model_memory_usage/profile_grad.pkl at 16debf2b: reserved
    # 4,439,670,784 B, allocated 4,436,169,216 B; torch 2.14 allocates 1 MiB less for this.
    allocated, reserved = on_card(
        PRELUDE
        + """
model = nn.Linear(10_000, 50_000, device="cuda")
for _ in range(3):
    inputs = torch.randn(5_000, 10_000, device="cuda")
    outputs = model(inputs)
print(json.dumps(peaks()))
""",
        card="h100-80gb",
    )
    assert reserved == 4_439_670_784
    assert 4_436_169_216 - allocated in (0, MIB)


def test_a_transformer_step_runs_in_bf16(on_card):
    seen = on_card(
        TRANSFORMER + "step(4); step(4)\n"
        "report(peaks=peaks(), states=len(optimizer.state), weights=len(list(model.parameters())))"
    )
    assert seen["states"] == seen["weights"]
    assert seen["peaks"][0] > 16 * 18_000_000  # weights, gradients and states alone


def needs_code_for(card: str) -> None:
    """Skip a test on a card for which the installed torch brings no kernels; it refuses such."""
    import torch

    built = torch._C._cuda_getArchFlags() or ""
    if str(find_card(card).capability[0]) not in re.findall(r"sm_(\d+)\d", built):
        pytest.skip(f"torch {torch.__version__} is built for {built}, and not for a {card}")


@pytest.mark.parametrize("card", ["t4", "a100-80gb", "h100-80gb", "b200", "rtx-5090"])
def test_a_transformer_step_runs_on_every_generation(on_card, card):
    needs_code_for(card)
    script = TRANSFORMER + "step(2); step(2); print(json.dumps(torch.cuda.get_device_capability()))"
    assert on_card(script, card=card)[0] in (7, 8, 9, 10, 12)


def test_convolutions_train_in_fp16_with_a_scaler(on_card):
    seen = on_card(
        CONVOLUTIONS + "step(16); step(16)\n"
        "report(scale=scaler.get_scale(), states=len(optimizer.state), peaks=peaks(),\n"
        "       weights=len(list(model.parameters())))",
        card="a100-40gb",
    )
    assert seen["scale"] == 65536  # it was not lowered, so both optimizer steps were applied
    assert seen["states"] == seen["weights"]
    assert seen["peaks"][0] > 0


def test_convolution_workspaces_are_asked_of_cudnn(on_card):
    seen = on_card(
        PRELUDE + "from memfit.virtual import control\n"
        "c = nn.Conv2d(64, 64, 3, padding=1).cuda().half()\n"
        "x = torch.randn(64, 64, 128, 128, device='cuda', dtype=torch.half)\n"
        "before = torch.cuda.memory_allocated(); torch.cuda.reset_peak_memory_stats()\n"
        "y = c(x)\n"
        "report(asked=control.asks_cudnn(), beside=torch.cuda.max_memory_allocated() - before\n"
        "       - y.nbytes)",
        card="rtx-3090",
    )
    if not seen["asked"]:
        pytest.skip("this cuDNN cannot plan for a described device")
    assert seen["beside"] > MIB


@pytest.mark.parametrize(
    ("card", "size"),
    [("rtx-4090", WORKSPACE), ("a100-40gb", WORKSPACE), ("h100-80gb", LARGE_WORKSPACE)],
)
def test_the_cublas_workspace_follows_the_generation(on_card, card, size):
    script = """
        import json, torch
        a = torch.randn(64, 64, device="cuda")
        a @ a
        blocks = [b for s in torch.cuda.memory_snapshot() for b in s["blocks"]]
        print(json.dumps([b["size"] for b in blocks if b["state"] == "active_allocated"]))
    """
    assert size in on_card(script, card=card)


@pytest.mark.parametrize(
    ("make", "reserve", "workspace"),
    [
        ("nn.LSTM(512, 512, 2)", 72_089_856, 74_187_264),
        ("nn.LSTM(512, 512, 2, bidirectional=True)", 144_179_456, 176_947_712),
        ("nn.LSTM(512, 512, 2, proj_size=128)", 88_473_856, 66_716_160),
        ("nn.GRU(512, 512, 2)", 85_197_056, 63_832_576),
        ("nn.RNN(512, 512, 2)", 19_661_056, 55_443_968),
        ("nn.LSTM(512, 512, 2).half()", 36_045_056, 45_482_496),
    ],
)
def test_recurrent_layers_take_about_what_cudnn_answers_without_a_card(
    on_card, make, reserve, workspace
):
    # cudnnGetRNNTempSpaceSizes of cuDNN 9.24, given a handle of zeros: 32 sequences of 100 steps.
    asked = on_card(
        PRELUDE
        + f"""
layer = {make}.cuda()
x = torch.randn(100, 32, 512, device="cuda", dtype=next(layer.parameters()).dtype)
torch.cuda.memory._record_memory_history(stacks="python", context=None)
layer(x)
events = torch.cuda.memory._snapshot()["device_traces"][0]
print(json.dumps([event["size"] for event in events if event["action"] == "alloc"]))
"""
    )
    assert reserve in asked
    assert any(0.8 * workspace < size < 1.2 * workspace for size in asked)


def test_the_same_step_gives_the_same_bytes_every_time(on_card):
    script = TRANSFORMER + "step(3); step(3); print(json.dumps(peaks()))"
    assert len({tuple(on_card(script, card="h100-80gb")) for _ in range(3)}) == 1
    script = CONVOLUTIONS + "step(8); step(8); print(json.dumps(peaks()))"
    assert len({tuple(on_card(script, card="a100-40gb")) for _ in range(3)}) == 1


def test_cudnn_attention_gives_the_same_bytes_every_time(on_card):
    script = """
        import json, torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        shape = (4, 8, 1024, 64)
        q = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attend = torch.nn.functional.scaled_dot_product_attention
            attend(q, q, q, is_causal=True).sum().backward()
        print(json.dumps(torch.cuda.max_memory_allocated()))
    """
    assert len({on_card(script, card="h100-80gb") for _ in range(3)}) == 1


@pytest.mark.parametrize("card", ["h100-80gb", "b200"])
def test_a_plan_whose_kernel_is_not_generated_has_the_workspace_of_one_that_is(on_card, card):
    needs_code_for(card)
    attention = (
        PRELUDE
        + """
from torch.nn.attention import SDPBackend, sdpa_kernel
seen = []
for shape, dtype, causal, dropout in [
    ((2, 8, 1024, 64), torch.bfloat16, True, 0.0),
    ((3, 4, 777, 128), torch.float16, False, 0.0),
    ((1, 16, 2048, 80), torch.bfloat16, True, 0.125),
]:
    q = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        attend = F.scaled_dot_product_attention
        attend(q, q, q, is_causal=causal, dropout_p=dropout).sum().backward()
    seen.append(peaks())
    torch.cuda.reset_peak_memory_stats()
print(json.dumps(seen))
"""
    )
    convolutions = CONVOLUTIONS + "step(8); step(8); print(json.dumps(peaks()))"
    for script in (attention, convolutions):
        without = on_card(script, card=card)
        assert without == on_card(script, card=card, env={"MEMFIT_VGPU_COMPILE": "1"})


def test_a_step_calls_nothing_whose_result_was_invented(on_card):
    names = on_card(
        TRANSFORMER + "step(2)\nfrom memfit.virtual import control\n"
        "print(json.dumps(control.unknown_names()))"
    )
    assert names == []


def test_a_torch_without_code_for_the_card_fails_as_on_the_card(nursery):
    script = """
        import json, torch, warnings
        warnings.simplefilter("ignore")
        arch = torch.cuda.get_arch_list()
        try:
            torch.ones(3, device="cuda")
            print(json.dumps([arch, "ran"]))
        except RuntimeError as error:
            print(json.dumps([arch, str(error)]))
    """
    arch, outcome = nursery.value(script, card="v100-16gb")
    assert ("sm_70" in arch) == (outcome == "ran")
    assert outcome == "ran" or "no kernel image" in outcome


def test_a_loader_pins_memory(on_card):
    total = on_card(
        PRELUDE
        + """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(64.0).view(16, 4))
for (x,) in DataLoader(data, batch_size=4, pin_memory=True, num_workers=1):
    assert x.is_pinned()
    y = x.to("cuda", non_blocking=True)
print(json.dumps(y.cpu().sum().item()))
"""
    )
    assert total == sum(range(48, 64))


def test_graphs_are_captured_and_replayed(on_card):
    pools = on_card(
        PRELUDE
        + """
x = torch.randn(256, 256, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    x @ x
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    assert torch.cuda.is_current_stream_capturing()
    y = x @ x + 1
assert not torch.cuda.is_current_stream_capturing()
graph.replay()
print(json.dumps(len({s["segment_pool_id"] for s in torch.cuda.memory_snapshot()})))
"""
    )
    assert pools == 2


def test_data_parallel_training_runs_as_one_of_four(on_card):
    seen = on_card(
        PRELUDE
        + """
import torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=4)
model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024, device="cuda"), device_ids=[0])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
part = torch.full((3,), 2.0, device="cuda")
parts = [torch.empty(3, device="cuda") for _ in range(4)]
dist.all_gather(parts, part)
report(world=dist.get_world_size(), peaks=peaks(), parts=[p.tolist() for p in parts])
"""
    )
    assert seen["world"] == 4
    assert seen["parts"] == [[2.0] * 3] * 4
    assert seen["peaks"][0] > 5 * 4 * MIB  # weights, gradients, two states, and the buckets


def test_sharded_training_runs_in_the_fake_group(on_card):
    states = on_card(
        PRELUDE
        + """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 512, device="cuda")).sum().backward()
optimizer.step()
print(json.dumps(len(optimizer.state)))
"""
    )
    assert states == 4
