"""What running out of memory looks like in words: messages as people reported them."""

from __future__ import annotations

import pytest

from memfit.records import Verdict
from memfit.trial.signatures import SIGNATURES, match

DEFINITE = [
    (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.55 GiB "
        "of which 1.19 GiB is free. Process 1 has 22.35 GiB memory in use.",
        "CUDA allocator",
    ),
    (
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some "
        "other API call, so the stacktrace below might be incorrect.",
        "CUDA runtime",
    ),
    ("CUDA driver error: out of memory", "CUDA driver"),
    (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuBLAS",
    ),
    ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cuDNN allocation"),
    (
        "HIP out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 15.98 GiB "
        "of which 238.00 MiB is free. [...] try setting PYTORCH_HIP_ALLOC_CONF",
        "HIP allocator",
    ),
    (
        "XPU out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 15.11 GiB.",
        "XPU allocator",
    ),
    ("Allocation is out of device memory on current platform.", "XPU platform"),
    (
        "MPS backend out of memory (MPS allocated: 17.16 GB, other allocations: 640.89 MB, max "
        "allowed: 18.13 GB). Tried to allocate 512.00 MB on private pool.",
        "MPS allocator",
    ),
    (
        "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error, NCCL version 2.20.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'",
        "NCCL",
    ),
]
HOST = [
    "[enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 137438953472 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried "
    "to allocate 137438953472 bytes.",
]
DOUBTFUL = [
    ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "cuDNN internal"),
    (
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
        "non-contiguous input.",
        "cuDNN not supported",
    ),
    ("Unable to find a valid cuDNN algorithm to run convolution", "cuDNN algorithm"),
    ("GET was unable to find an engine to execute this computation", "cuDNN engine"),
    ("cuFFT error: CUFFT_INTERNAL_ERROR", "cuFFT"),
    (
        "NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
        '"../c10/cuda/CUDACachingAllocator.cpp":1123, please report a bug to PyTorch.',
        "MIG",
    ),
]
INDEX = [
    "upsample_nearest2d only supports output tensors with less than INT_MAX elements, but got "
    "[16, 512, 512, 1024]",
    "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got "
    "false.",
]
NOT_MEMORY = [
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
    "asynchronously reported at some other API call",
    "CUDA error: device-side assert triggered",
    "CUDA error: misaligned address",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb )`",
    "CUDA error: no kernel image is available for execution on the device",
    "mat1 and mat2 shapes cannot be multiplied (32x768 and 512x768)",
    "Expected all tensors to be on the same device, but found at least two devices",
    "the shared memory of the dataloader worker is gone",
    "",
]


@pytest.mark.parametrize("nearly_full", [True, False])
@pytest.mark.parametrize(("message", "name"), DEFINITE)
def test_a_lack_of_device_memory_is_recognised(
    message: str, name: str, *, nearly_full: bool
) -> None:
    signature = match(message, nearly_full=nearly_full)

    assert signature is not None
    assert (signature.name, signature.verdict) == (name, Verdict.OOM)


@pytest.mark.parametrize("message", HOST)
def test_a_lack_of_host_memory_is_recognised(message: str) -> None:
    signature = match(message, nearly_full=False)

    assert signature is not None
    assert signature.verdict is Verdict.HOST_OOM


@pytest.mark.parametrize("message", INDEX)
def test_an_index_limit_is_not_a_lack_of_memory(message: str) -> None:
    signature = match(message, nearly_full=True)

    assert signature is not None
    assert signature.verdict is Verdict.SIZE_LIMIT


@pytest.mark.parametrize(("message", "name"), DOUBTFUL)
def test_a_doubtful_message_counts_when_the_device_is_nearly_full(message: str, name: str) -> None:
    signature = match(message, nearly_full=True)

    assert signature is not None
    assert (signature.name, signature.verdict) == (name, Verdict.OOM)


@pytest.mark.parametrize("message", [message for message, _ in DOUBTFUL])
def test_a_doubtful_message_with_memory_to_spare_is_an_error(message: str) -> None:
    assert match(message, nearly_full=False) is None


@pytest.mark.parametrize("nearly_full", [True, False])
@pytest.mark.parametrize("message", NOT_MEMORY)
def test_what_is_no_lack_of_memory_is_not_taken_for_one(message: str, *, nearly_full: bool) -> None:
    assert match(message, nearly_full=nearly_full) is None


def test_every_signature_has_a_message_and_names_where_it_was_seen() -> None:
    seen = {name for _, name in [*DEFINITE, *DOUBTFUL]} | {"host allocator", "32-bit index"}

    assert {signature.name for signature in SIGNATURES} == seen
    assert all(signature.source for signature in SIGNATURES)
