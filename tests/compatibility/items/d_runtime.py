"""What the runtime offers: pinned memory, streams, loaders, devices, the allocator, its tools."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.compatibility.catalogue import Refused, item
from tests.compatibility.training import CARD, integers, random, train

RUNTIME, DEVICES = "Runtime", "Several devices in one process"
ALLOCATOR, TOOLS = "Allocator settings", "Tools"
MIB = 2**20


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).to(CARD)


def _step() -> None:
    model = _model()
    train(model, lambda: model(random(64, 512)).square().mean())


@item(RUNTIME, "pinned memory")
def pinned() -> None:
    """pin_memory, cudaHostRegister, transfers without blocking in both directions."""
    host = torch.arange(1000.0).pin_memory()
    assert host.is_pinned()
    back = torch.empty(1000, pin_memory=True)
    back.copy_(host.to(CARD, non_blocking=True), non_blocking=True)
    torch.cuda.synchronize()
    assert back.equal(host)
    large = torch.empty(MIB)
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(large.data_ptr(), large.nbytes, 0)) == 0
    assert large.is_pinned()
    assert int(runtime.cudaHostUnregister(large.data_ptr())) == 0


@item(RUNTIME, "side streams and events")
def streams() -> None:
    """Work on two streams, record_stream, waits, timed events, stream priorities, a step."""
    side, urgent = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    x = random(256, 256)
    start.record()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x @ x
        x.record_stream(side)
    with torch.cuda.stream(urgent):
        urgent.wait_stream(side)
        z = y + 1
        y.record_stream(urgent)
        _step()
    torch.cuda.current_stream().wait_stream(urgent)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0
    assert urgent.query()
    assert end.query()
    assert z.shape == (256, 256)
    torch.cuda.synchronize()


@item(RUNTIME, "DataLoader with workers and pinning")
def loader() -> None:
    """2 worker processes, the pinning thread, persistent workers, 2 epochs of training."""
    data = TensorDataset(torch.randn(64, 512), torch.randint(10, (64,)))
    batches = DataLoader(data, 16, num_workers=2, pin_memory=True, persistent_workers=True)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for x, y in batches:
            assert x.is_pinned()
            scores = model(x.to(CARD, non_blocking=True))
            nn.functional.cross_entropy(scores, y.to(CARD, non_blocking=True)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(optimizer.state) == 4


@item(RUNTIME, "random state")
def generators() -> None:
    """manual_seed, saving and restoring the generator, fork_rng, a generator of one's own."""
    torch.cuda.manual_seed_all(1)
    kept = torch.cuda.get_rng_state()
    random(10)
    torch.cuda.set_rng_state(kept)
    with torch.random.fork_rng():
        random(10)
    own = torch.Generator("cuda").manual_seed(3)
    torch.randperm(100, device=CARD, generator=own)
    torch.multinomial(torch.ones(10, device=CARD), 3, generator=own)


@item(RUNTIME, "saving and loading")
def saving() -> None:
    """State of model and optimizer through a file, back onto the card."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, lambda: model(random(8, 512)).square().mean(), optimizer=optimizer)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        found = torch.load(file, map_location="cuda")
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])


@item(RUNTIME, "deterministic mode")
def deterministic() -> None:
    """use_deterministic_algorithms, an embedding, a convolution and a linear layer."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    layers = (nn.Embedding(100, 64), nn.Conv1d(32, 32, 3), nn.Flatten(), nn.Linear(32 * 62, 10))
    model = nn.Sequential(*layers).to(CARD)
    train(model, lambda: model(integers(100, 8, 32)).square().mean())


@item(
    RUNTIME,
    "default device",
    why="AdamW of this torch reads its step counters from the card, where no kernel counted",
)
def defaults() -> None:
    """set_default_device("cuda"), AdamW with its step counters on the card."""
    torch.set_default_device("cuda")
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    train(model, lambda: model(torch.randn(8, 64)).square().mean())


@item(DEVICES, "DataParallel", devices=2)
def data_parallel() -> None:
    """nn.DataParallel over 2 devices."""
    model = nn.DataParallel(_model())
    train(model, lambda: model(random(64, 512)).square().mean())
    assert torch.cuda.max_memory_allocated(1) > 0


@item(DEVICES, "a model over two devices", devices=2)
def split() -> None:
    """Half of the layers on each device, activations copied across."""
    first, second = nn.Linear(512, 512).to("cuda:0"), nn.Linear(512, 512).to("cuda:1")
    model = nn.ModuleList([first, second])
    train(model, lambda: second(first(random(64, 512)).to("cuda:1")).square().mean())
    assert torch.cuda.can_device_access_peer(0, 1)
    assert torch.cuda.max_memory_allocated(1) > 0


@item(DEVICES, "nccl collectives of one process", devices=2)
def one_process() -> None:
    """torch.cuda.comm and torch.cuda.nccl: broadcast, reduce_add, scatter, gather, all_reduce."""
    from torch.cuda import comm, nccl

    copies = comm.broadcast(random(16, 16), [0, 1])
    assert comm.reduce_add(copies).shape == (16, 16)
    assert comm.gather(comm.scatter(random(16, 16), [0, 1])).shape == (16, 16)
    nccl.all_reduce(list(copies))


def _under(settings: str) -> dict[str, str]:
    return {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}


def _churn() -> None:
    """Sizes that come and go, large enough to split blocks and to free segments."""
    held = []
    for round_ in range(4):
        held = [random((3 + 5 * i + round_) * MIB // 4) for i in range(8)][::2]
    _step()
    del held
    torch.cuda.empty_cache()
    _step()


@item(ALLOCATOR, "expandable_segments", env=_under("expandable_segments:True"))
def expandable() -> None:
    """Blocks of 3 to 41 MiB come and go, the cache is emptied, steps before and after."""
    _churn()
    assert any(s["is_expandable"] for s in torch.cuda.memory_snapshot())


@item(ALLOCATOR, "backend:cudaMallocAsync", env=_under("backend:cudaMallocAsync"))
def malloc_async() -> None:
    """The same; the pool's figures count whole pages of 2 MiB, where a real one packs blocks."""
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    _churn()
    assert torch.cuda.max_memory_allocated() > 0


@item(ALLOCATOR, "max_split_size_mb", env=_under("max_split_size_mb:32"))
def max_split() -> None:
    """The same with max_split_size_mb:32."""
    _churn()


@item(ALLOCATOR, "garbage_collection_threshold", env=_under("garbage_collection_threshold:0.6"))
def collection() -> None:
    """The same on a fraction of the card, so that the threshold is met."""
    torch.cuda.set_per_process_memory_fraction(0.006)
    _churn()


@item(ALLOCATOR, "roundup_power2_divisions", env=_under("roundup_power2_divisions:4"))
def roundup() -> None:
    """The same with roundup_power2_divisions:4; a block of 5 MiB becomes one of 5 x 1 MiB."""
    before = torch.cuda.memory_allocated()
    kept = torch.empty(4 * MIB + 4096, dtype=torch.uint8, device=CARD)
    assert torch.cuda.memory_allocated() - before == 5 * MIB
    del kept
    _churn()


@item(ALLOCATOR, "out of memory")
def out_of_memory() -> str:
    """torch.OutOfMemoryError with its own words, then a step in what is left."""
    held = []
    try:
        while True:
            held.append(torch.empty(4 * 2**30, dtype=torch.uint8, device=CARD))
    except torch.OutOfMemoryError as error:
        words = str(error)
    assert "CUDA out of memory. Tried to allocate 4.00 GiB" in words
    held.clear()
    torch.cuda.empty_cache()
    _step()
    return words.split(". ")[1]


@item(ALLOCATOR, "private pools")
def pools() -> None:
    """torch.cuda.MemPool with use_mem_pool."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = random(MIB)
    assert len({s["segment_pool_id"] for s in torch.cuda.memory_snapshot()}) > 0
    assert kept.is_cuda


@item(TOOLS, "memory snapshot")
def snapshot() -> None:
    """_record_memory_history with stacks, _snapshot, _dump_snapshot, memory_summary."""
    torch.cuda.memory._record_memory_history(max_entries=10000)
    _step()
    found = torch.cuda.memory._snapshot()
    assert found["device_traces"][0]
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.memory._dump_snapshot(f"{folder}/snapshot.pickle")
        assert (Path(folder) / "snapshot.pickle").stat().st_size > 1000
    assert "Allocated memory" in torch.cuda.memory_summary()


@item(TOOLS, "profiler")
def profiler() -> None:
    """torch.profiler with CPU and CUDA activities, memory, shapes; trace written to a file."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, profile_memory=True, record_shapes=True) as seen:
        _step()
    assert seen.key_averages().table()
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
    with torch.autograd.profiler.emit_nvtx():
        _step()


@item(TOOLS, "anomaly detection and hooks")
def anomaly() -> None:
    """detect_anomaly, register_hook, post-accumulate hooks that step while backward runs."""
    with torch.autograd.detect_anomaly(check_nan=False):
        _step()
    model = _model()
    own = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def apply(parameter: torch.Tensor) -> None:
        own[parameter].step()  # type: ignore[index]
        own[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    model(random(8, 512)).square().mean().backward()
    assert all(len(o.state) == 1 for o in own.values())


@item(TOOLS, "NVML: memory, processes, utilization")
def nvml() -> None:
    """The same memory in use as CUDA says, list_gpu_processes, utilization, after a step."""
    _step()
    free, total = torch.cuda.mem_get_info()
    assert total - free == torch.cuda.device_memory_used()
    assert torch.cuda.list_gpu_processes()
    torch.cuda.utilization()


@item(TOOLS, "NVML: temperature, power, clock")
def sensors() -> None:
    """A sensor that a virtual card does not have answers as on a card without it."""
    import pynvml

    for read in (torch.cuda.temperature, torch.cuda.power_draw, torch.cuda.clock_rate):
        try:
            read()
        except pynvml.NVMLError_NotSupported as error:
            words = f"NVMLError_NotSupported: {error}"
    raise Refused(words)


@item(TOOLS, "torch.func")
def functorch() -> None:
    """Per-example gradients by vmap over grad; jvp; a Hessian-vector product."""
    from torch.func import functional_call, grad, jvp, vmap

    model = _model()
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    x, y = random(16, 512), integers(10, 16)

    def loss(w: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = functional_call(model, w, (x[None],))
        return nn.functional.cross_entropy(scores, y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    assert each["0.weight"].shape == (16, 512, 512)
    jvp(torch.sin, (x,), (x,))
