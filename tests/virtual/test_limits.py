"""What the virtual GPU cannot know is counted by the driver and said in words."""

from __future__ import annotations

import pytest

from memfit.units import MIB
from memfit.virtual import words
from tests.virtual.scripts import PRELUDE

ASK = PRELUDE + "from memfit.virtual import control\n"


def test_nothing_is_said_of_what_did_not_happen():
    assert [*words.invented(0, ()), *words.benchmark(0, 0, 0), *words.pool(0)] == []


def test_sizes_of_recurrent_layers_are_said_to_be_estimates():
    said = list(words.invented(3, ("cudnnGetRNNTempSpaceSizes",), whose=" of process 7"))

    assert said[0].startswith("3 calls of process 7 went to functions whose results")
    assert "recurrent layers" in said[1]
    assert "estimated" in said[1]


@pytest.mark.virtual
def test_benchmark_mode_names_the_band_that_it_leaves_open(on_card):
    script = """
torch.backends.cudnn.benchmark = {on}
x = torch.randn(8, 32, 28, 28, device="cuda", dtype=torch.half)
F.conv2d(x, torch.randn(32, 32, 3, 3, device="cuda", dtype=torch.half), padding=1)
held = torch.cuda.max_memory_allocated()
report(asked=control.asks_cudnn(), tried=control.benchmarked(), held=held)
"""
    off = on_card(ASK + script.format(on=False), card="a100-40gb")
    on = on_card(ASK + script.format(on=True), card="a100-40gb")

    assert off["tried"] == [0, 0, 0]
    if not on["asked"]:
        pytest.skip("this cuDNN cannot plan for a described device")
    tried, least, most = on["tried"]
    assert tried == 1
    assert 0 <= least <= most
    assert most <= on["held"]  # while the plans are tried, the largest workspace is there
    (said,) = words.benchmark(tried, least, most)
    assert "took all for equally fast" in said
    assert "anything from" in said


@pytest.mark.virtual
def test_the_rounding_of_a_pools_blocks_is_bounded(on_card):
    rounding = on_card(
        f"""{ASK}
import ctypes
driver, held = ctypes.CDLL(None), []
for size in (512, 3 << 20, 2 << 20, 100 << 10):
    at = ctypes.c_void_p()
    assert driver.cudaMallocAsync(ctypes.byref(at), ctypes.c_size_t(size), None) == 0
    held.append(at)
seen = [control.rounding_bytes()]
for at in held:
    assert driver.cudaFreeAsync(at, None) == 0
big = ctypes.c_void_p()
assert driver.cudaMallocAsync(ctypes.byref(big), ctypes.c_size_t(64 << 20), None) == 0
seen.append(control.rounding_bytes())
print(json.dumps(seen))
"""
    )
    assert rounding == [(2 * MIB - 512) + MIB + (2 * MIB - (100 << 10)), 0]
    (said,) = words.pool(rounding[0])
    assert "up to 4.90 MiB of the peak are such rounding" in said
