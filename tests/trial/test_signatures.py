"""What running out of memory looks like in words: messages as people reported them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.records import Verdict
from memfit.trial.signatures import SIGNATURES, match

if TYPE_CHECKING:
    from memfit.trial.signatures import Doubt

NOTHING: frozenset[Doubt] = frozenset()
ALL: frozenset[Doubt] = frozenset({"device", "shared"})
NOTE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)


@dataclass(frozen=True, slots=True)
class Seen:
    """A message that somebody saw."""

    text: str
    name: str
    """The signature that it carries."""
    collected: bool = False
    """Whether it is one of the seventeen that were run through the predicates of other tools."""


OOM = [
    Seen(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.55 GiB "
        "of which 1.19 GiB is free. Process 1 has 22.35 GiB memory in use.",
        "CUDA allocator",
        collected=True,
    ),
    Seen(
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
        "per_process_memory_fraction limit. Requested size: 2.00 GiB",
        "CUDA allocator",
    ),
    Seen("CUDA out of memory. Tried to allocate more than 1EB memory.", "CUDA allocator"),
    Seen(
        "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
        "Currently allocated     : 9.43 GiB\nRequested               : 640.00 MiB",
        "CUDA asynchronous allocator",
    ),
    Seen(f"CUDA error: out of memory{NOTE}", "CUDA runtime", collected=True),
    Seen("CUDA driver error: out of memory", "CUDA driver", collected=True),
    Seen("cuLaunchKernel failed: CUDA_ERROR_OUT_OF_MEMORY", "CUDA driver"),
    Seen(
        "parallel_for failed: cudaErrorMemoryAllocation: out of memory",
        "CUDA runtime code",
    ),
    Seen(
        "std::bad_alloc: cudaErrorMemoryAllocation: out of memory",
        "CUDA runtime code",
    ),
    Seen("Triton Error [CUDA]: out of memory", "Triton"),
    Seen(
        'cuDNN SDPA execution failed with error code ["CUDNN_BACKEND_API_FAILED"]: err 2 != '
        "CUDA_SUCCESS\nCUDA ran out of memory outside PyTorch's allocator. If this workload uses "
        "many dynamic shapes, cuDNN may need additional device memory",
        "outside the allocator",
    ),
    Seen(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuBLAS",
        collected=True,
    ),
    Seen(
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "cuSOLVER and cuSPARSE",
    ),
    Seen("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cuDNN allocation", collected=True),
    Seen(
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuDNN allocation",
    ),
    Seen("cuFFT error: CUFFT_ALLOC_FAILED", "cuFFT allocation"),
    Seen(
        "HIP out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 15.98 GiB "
        "of which 238.00 MiB is free. [...] try setting PYTORCH_HIP_ALLOC_CONF",
        "HIP allocator",
        collected=True,
    ),
    Seen(f"HIP error: out of memory{NOTE.replace('CUDA', 'HIP')}", "HIP runtime"),
    Seen(
        "XPU out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 15.11 GiB.",
        "XPU allocator",
        collected=True,
    ),
    Seen("Allocation is out of device memory on current platform.", "XPU platform", collected=True),
    Seen(
        "MPS backend out of memory (MPS allocated: 17.16 GB, other allocations: 640.89 MB, max "
        "allowed: 18.13 GB). Tried to allocate 512.00 MB on private pool.",
        "MPS allocator",
        collected=True,
    ),
    Seen(
        "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error, NCCL version 2.20.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'",
        "NCCL",
        collected=True,
    ),
    Seen("include/alloc.h:102 NCCL WARN Cuda failure 'out of memory'", "NCCL"),
    Seen("include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes", "NCCL"),
]
HOST = [
    Seen(
        "[enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 137438953472 bytes. Error code 12 (Cannot allocate memory)",
        "host allocator",
        collected=True,
    ),
    Seen(
        "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate 137438953472 bytes.",
        "host allocator",
        collected=True,
    ),
    Seen(
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "cuDNN host allocation"
    ),
    Seen("std::bad_alloc", "C++ allocation"),
    Seen(
        "unable to mmap 29764 bytes from file </torch_10182_3020184674_63991>: "
        "Cannot allocate memory (12)",
        "host mapping",
    ),
    Seen("$ Torch: unable to mmap memory: you tried to mmap 96GB.", "host mapping"),
    Seen(
        "unable to write to file </torch_239305_1669300387>: No space left on device (28)",
        "shared memory",
    ),
    Seen(
        "unable to allocate shared memory(shm) for file </torch_114_31_13>: Success (0)",
        "shared memory",
    ),
]
DOUBTFUL = [
    Seen("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "cuDNN internal", collected=True),
    Seen(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
        "non-contiguous input.",
        "cuDNN not supported",
    ),
    Seen(
        "Unable to find a valid cuDNN algorithm to run convolution",
        "cuDNN algorithm",
        collected=True,
    ),
    Seen(
        "GET was unable to find an engine to execute this computation",
        "cuDNN engine",
        collected=True,
    ),
    Seen("FIND was unable to find an engine to execute this computation", "cuDNN engine"),
    Seen("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "cuDNN handle"),
    Seen(
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuBLAS handle",
    ),
    Seen("cuFFT error: CUFFT_INTERNAL_ERROR", "cuFFT internal", collected=True),
    Seen(
        "NVML_SUCCESS == r INTERNAL ASSERT FAILED at "
        '"../c10/cuda/CUDACachingAllocator.cpp":1123, please report a bug to PyTorch.',
        "MIG",
        collected=True,
    ),
    Seen(
        "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
        '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":963, please report a bug to PyTorch.',
        "MIG",
    ),
    Seen(
        '!handles_.at(i) INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp"'
        ":430, please report a bug to PyTorch.",
        "allocator handles",
    ),
    Seen("CUDA driver error: device not ready", "allocator handles"),
    Seen(
        "NCCL error in: ProcessGroupNCCL.cpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO "
        "for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.",
        "NCCL without a reason",
    ),
]
SHARED = [
    Seen(
        "DataLoader worker (pid 8120) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory. Please try to raise your shared memory "
        "limit.",
        "bus error",
    ),
]
INDEX = [
    Seen(
        "upsample_nearest2d only supports output tensors with less than INT_MAX elements, but got "
        "[16, 512, 512, 1024]",
        "32-bit index",
    ),
    Seen(
        "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got "
        "false.  (Could this error message be improved?  If so, please report an enhancement "
        "request to PyTorch.)",
        "32-bit index",
    ),
    Seen(
        "nonzero is not supported for tensors with more than INT_MAX elements, file a support "
        "request",
        "32-bit index",
    ),
    Seen("cub sort does not support sorting more than INT_MAX elements", "32-bit index"),
    Seen("input tensor must fit into 32-bit index math", "32-bit index"),
    Seen(
        "Expected output.numel() <= std::numeric_limits<int32_t>::max() to be true, but got "
        "false.  (Could this error message be improved?",
        "32-bit index",
    ),
    Seen(
        "input.numel() < std::numeric_limits<int32_t>::max() INTERNAL ASSERT FAILED at "
        '"/pytorch/aten/src/ATen/native/cuda/AdaptiveAveragePooling.cu":693',
        "32-bit index",
    ),
    Seen(
        "kthvalue(): dimension 0 is too large (2147483648). The current CUDA implementation "
        "supports dimension sizes up to 2147483647",
        "32-bit index",
    ),
    Seen("num_inp 2147483648 is too big to for CUB", "32-bit index"),
    Seen("dst stride > INT32_MAX is not supported", "32-bit index"),
    Seen("batch (2147483648) is too large to fit into a int (4 bytes)", "32-bit index"),
    Seen("Input tensor is too large.", "too large for a kernel"),
    Seen("Output size is too large.", "too large for a kernel"),
    Seen("add: Argument #0: tensor too large or too many dimensions", "too large for a kernel"),
    Seen("Tensor too large or too many (> 25) dimensions", "too large for a kernel"),
]
NOT_MEMORY = [
    f"CUDA error: an illegal memory access was encountered{NOTE}",
    f"CUDA error: device-side assert triggered{NOTE}",
    f"CUDA error: misaligned address{NOTE}",
    f"CUDA error: unspecified launch failure{NOTE}",
    f"CUDA error: uncorrectable ECC error encountered{NOTE}",
    f"CUDA error: invalid configuration argument{NOTE}",
    f"CUDA error: too many resources requested for launch{NOTE}",
    f"CUDA error: no kernel image is available for execution on the device{NOTE}",
    f"CUDA error: all CUDA-capable devices are busy or unavailable{NOTE}",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb )`",
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, opa, opb )`",
    "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( handle, opa, opb )`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "cuDNN error: CUDNN_STATUS_BAD_PARAM",
    "cuDNN error: CUDNN_STATUS_MAPPING_ERROR",
    "cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.",
    "CUDA driver error: invalid argument",
    "Triton Error [CUDA]: device kernel image is invalid",
    "out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block "
    "sizes or `num_stages` may help.",
    "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error, NCCL version 2.20.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 1 'invalid argument'",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=20980, OpType=BROADCAST)",
    "mat1 and mat2 shapes cannot be multiplied (32x768 and 512x768)",
    "Expected all tensors to be on the same device, but found at least two devices",
    "CUDA error: invalid device ordinal",
    "index 50304 is out of bounds for dimension 0 with size 50304",
    "DataLoader worker (pid 4912) is killed by signal: Segmentation fault. ",
    "DataLoader worker (pid(s) 4912) exited unexpectedly",
    "the shared memory of the dataloader worker is gone",
    "number of categories cannot exceed 2^24",
    "Expected to - from <= std::numeric_limits<T>::max() to be true, but got false.",
    "Shared memory manager connection has timed out",
    "unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)",
    "unable to write to file </data/checkpoint.pt>: No space left on device (28)",
    "libgomp-d22c30c5.so.1: cannot allocate memory in static TLS block",
    "can't start new thread",
    "Trying to backward through the graph a second time",
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation",
    "",
]
FOUND = [*OOM, *HOST, *INDEX]
EVERY = [*FOUND, *DOUBTFUL, *SHARED]


def verdict_of(text: str, *, full: frozenset[Doubt] = NOTHING) -> Verdict | None:
    signature = match(text, full=full)
    return None if signature is None else signature.verdict


def test_the_seventeen_messages_are_all_here() -> None:
    assert sum(seen.collected for seen in EVERY) == 17


@pytest.mark.parametrize("seen", [s for s in EVERY if s.collected], ids=lambda s: s.text[:50])
def test_each_of_the_seventeen_is_recognised_on_a_full_device(seen: Seen) -> None:
    assert verdict_of(seen.text, full=ALL) in (Verdict.OOM, Verdict.HOST_OOM)


@pytest.mark.parametrize("full", [ALL, NOTHING])
@pytest.mark.parametrize("seen", FOUND, ids=lambda s: s.text[:50])
def test_plain_words_are_recognised_whatever_is_free(seen: Seen, full: frozenset[Doubt]) -> None:
    signature = match(seen.text, full=full)

    assert signature is not None
    assert signature.name == seen.name
    assert signature.doubt is None
    assert (
        signature.verdict
        is {
            **dict.fromkeys([s.text for s in OOM], Verdict.OOM),
            **dict.fromkeys([s.text for s in HOST], Verdict.HOST_OOM),
            **dict.fromkeys([s.text for s in INDEX], Verdict.SIZE_LIMIT),
        }[seen.text]
    )


@pytest.mark.parametrize("seen", DOUBTFUL, ids=lambda s: s.text[:50])
def test_doubtful_words_count_when_the_device_is_next_to_full(seen: Seen) -> None:
    signature = match(seen.text, full=frozenset({"device"}))

    assert signature is not None
    assert (signature.name, signature.verdict) == (seen.name, Verdict.OOM)
    assert signature.doubt == "device"


@pytest.mark.parametrize("seen", SHARED, ids=lambda s: s.text[:50])
def test_a_bus_error_counts_when_shared_memory_is_next_to_full(seen: Seen) -> None:
    assert verdict_of(seen.text, full=frozenset({"shared"})) is Verdict.HOST_OOM
    assert verdict_of(seen.text, full=frozenset({"device"})) is None


@pytest.mark.parametrize("seen", [*DOUBTFUL, *SHARED], ids=lambda s: s.text[:50])
def test_doubtful_words_with_memory_to_spare_are_an_error(seen: Seen) -> None:
    assert verdict_of(seen.text) is None


@pytest.mark.parametrize("full", [ALL, NOTHING])
@pytest.mark.parametrize("text", NOT_MEMORY)
def test_what_is_no_lack_of_memory_is_not_taken_for_one(text: str, full: frozenset[Doubt]) -> None:
    assert match(text, full=full) is None


ONE_LINE = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n"))


@given(
    seen=st.sampled_from(EVERY),
    before=st.sampled_from(["", "[rank3]: ", "step 7 failed: ", "RuntimeError: ", "\n"]),
    after=st.one_of(st.just(""), ONE_LINE.map(lambda text: f"\n{text}")),
)
def test_what_stands_around_a_message_changes_nothing(seen: Seen, before: str, after: str) -> None:
    signature = match(f"{before}{seen.text}{after}", full=ALL)

    assert signature is not None
    assert signature.verdict is verdict_of(seen.text, full=ALL)


@given(seen=st.sampled_from(EVERY), upper=st.lists(st.booleans(), min_size=1, max_size=40))
def test_capitals_change_nothing(seen: Seen, upper: list[bool]) -> None:
    text = "".join(
        c.upper() if upper[i % len(upper)] else c.lower() for i, c in enumerate(seen.text)
    )

    assert verdict_of(text, full=ALL) is verdict_of(seen.text, full=ALL)


@given(ONE_LINE)
def test_ordinary_text_is_no_lack_of_memory(text: str) -> None:
    assert match(text, full=NOTHING) is None


def test_every_signature_has_a_message_and_names_where_it_was_seen() -> None:
    assert {signature.name for signature in SIGNATURES} == {seen.name for seen in EVERY}
    assert all(signature.source for signature in SIGNATURES)
    assert len({signature.name for signature in SIGNATURES}) == len(SIGNATURES)
