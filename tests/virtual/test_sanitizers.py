"""The driver's C under the address and undefined-behaviour sanitizers, and many threads at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from memfit.virtual import build, find_card, prepare
from memfit.virtual.build import find_torch

pytestmark = pytest.mark.virtual

CARD = find_card("rtx-4090")
SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g",
)
FEW = 6 << 30
"""A card that twelve threads want more of than there is."""
REPORTED = 99
ASAN = {
    # Python, torch and CUDA's libraries leave much to the end of the process.
    "detect_leaks": 0,
    # The driver's terabytes of address space may lie where ASan keeps a gap shut.
    "protect_shadow_gap": 0,
    "exitcode": REPORTED,
}


@dataclass(frozen=True)
class Process:
    """Starts Python over a driver."""

    variables: dict[str, str]

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
            env={**os.environ, **self.variables},
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )


def runtime() -> str | None:
    """Return the path of ASan's library, or None when cc has no sanitizers."""
    options = ["cc", *SANITIZE, "-shared", "-x", "c", "-", "-o", "/dev/null"]
    try:
        built = subprocess.run(options, input=b"", check=False, capture_output=True)
        named = subprocess.run(
            ["cc", "-print-file-name=libasan.so"], check=False, capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        return None
    return str(Path(named).resolve()) if built.returncode == 0 and "/" in named else None


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A process over a driver whose hand-written files are watched by the sanitizers."""
    library = runtime()
    if library is None:
        pytest.skip("cc has no address and undefined-behaviour sanitizers")
    compile_plainly = build._run

    def compile_watched(command):
        watched = "-Wall" in command or ("-pthread" in command and "-shared" in command)
        compile_plainly([command[0], *(SANITIZE if watched else ()), *command[1:]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMFIT_CACHE", str(tmp_path_factory.mktemp("watched")))
        patch.setattr(build, "_run", compile_watched)
        variables = prepare(CARD, total_bytes=CARD.total_bytes)
    torch = find_torch()
    assert torch is not None
    # cuDNN opens its parts by name, beside itself; asked through ASan, that is beside ASan.
    beside = [str(folder) for folder in sorted(torch.site.glob("nvidia/*/lib"))]
    return Process(
        {
            **variables,
            "LD_PRELOAD": f"{library}:{variables['LD_PRELOAD']}",
            "LD_LIBRARY_PATH": ":".join([variables["LD_LIBRARY_PATH"], *beside]),
            "ASAN_OPTIONS": ":".join(f"{name}={value}" for name, value in ASAN.items()),
            "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={REPORTED}",
        }
    )


@pytest.fixture(scope="module")
def plain(driver_cache):
    return Process(prepare(CARD, total_bytes=FEW))


TRAINING = """
    import gc, json, threading, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    def train():
        layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
        model = nn.Sequential(*layers, nn.Linear(2048, 10)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(torch.randn(4, 3, 16, 16, device="cuda")).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss.item()

    def fill():
        held = []
        try:
            while True:
                held.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            return len(held)

    def train_beside():
        with torch.cuda.stream(torch.cuda.Stream()):
            train()

    train()
    filled = [fill()]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    train()
    filled.append(fill())
    gc.collect()
    torch.cuda.empty_cache()

    threads = [threading.Thread(target=train_beside) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

    model = nn.Linear(64, 64).cuda()
    data = TensorDataset(torch.randn(32, 64))
    for (x,) in DataLoader(data, batch_size=4, num_workers=1, pin_memory=True):
        assert x.is_pinned()
        model(x.to("cuda", non_blocking=True)).square().mean().backward()
    torch.cuda.synchronize()
    print(json.dumps(filled))
"""

THREADS = """
    import ctypes, json, random, threading
    from memfit.virtual import control
    driver = ctypes.CDLL(None)
    size, address = ctypes.c_size_t, ctypes.c_void_p
    driver.cudaMalloc.argtypes = driver.cudaMallocHost.argtypes = [ctypes.POINTER(address), size]
    driver.cudaFree.argtypes = driver.cudaFreeHost.argtypes = [address]
    driver.cudaMemset.argtypes = [address, ctypes.c_int, size]
    driver.cudaMemcpy.argtypes = [address, address, size, ctypes.c_int]
    TO_HOST = 2
    before = control.used_bytes()
    wrong, refused = [], [0] * 12

    def work(mine):
        choose = random.Random(mine)
        held = []
        for turn in range(250):
            at = address()
            wanted = choose.choice([512, 2 << 20, 5 << 20, 1 << 30])
            if driver.cudaMalloc(ctypes.byref(at), wanted) == 0:
                # Nobody else has this block, so no other value is read back. Zeros mean that the
                # driver no longer knows it: its record of values is small.
                driver.cudaMemset(at, mine + 1, 64)
                held.append(at)
            else:
                refused[mine] += 1
            for block in held:
                seen = ctypes.create_string_buffer(64)
                failed = driver.cudaMemcpy(seen, block, 64, TO_HOST)
                if failed or seen.raw not in (bytes(64), bytes([mine + 1]) * 64):
                    wrong.append((mine, turn))
            while len(held) > 3:
                if driver.cudaFree(held.pop(choose.randrange(len(held)))):
                    wrong.append((mine, "free"))
            host = address()
            if driver.cudaMallocHost(ctypes.byref(host), 4096) or driver.cudaFreeHost(host):
                wrong.append((mine, "host"))
            if not before <= control.used_bytes() <= TOTAL:
                wrong.append((mine, "used"))
        for block in held:
            driver.cudaFree(block)

    TOTAL = %d
    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(len(refused))]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(json.dumps([wrong[:5], control.used_bytes() - before, sum(refused) > 0]))
"""

TOO_FAR = """
    import ctypes
    driver = ctypes.CDLL(None)
    at = ctypes.c_void_p()
    driver.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(2 << 20))
    short = ctypes.create_string_buffer(4096)
    driver.cudaMemcpy(short, at, ctypes.c_size_t(16384), 2)
"""


def test_training_gives_the_sanitizers_nothing_to_report(watched):
    """Convolutions, out of memory, expandable segments, threads, pinned loading."""
    done = watched.run(TRAINING)

    assert "Sanitizer" not in done.stderr, done.stderr
    assert "runtime error" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    one, other = json.loads(done.stdout)
    assert 20 <= one <= 23
    assert one == other


def test_threads_give_the_sanitizers_nothing_to_report(watched):
    done = watched.run(THREADS % CARD.total_bytes)

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[:2] == [[], 0]


def test_the_sanitizers_do_watch(watched):
    done = watched.run(TOO_FAR)

    assert done.returncode == REPORTED
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


def test_threads_share_a_card_without_taking_each_others_memory(plain):
    """Twelve threads want more than the card has; blocks never overlap and none gets lost."""
    done = plain.run(THREADS % FEW)

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [[], 0, True]
