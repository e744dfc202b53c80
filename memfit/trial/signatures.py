"""What running out of memory looks like in words: a table of messages and where each was seen.

Exception classes come first and are told apart in `classify`; this table is for the rest, and only
for what torch and compiled code said. A signature with a `doubt` also has other causes, and counts
only when what it names was next to full. Rows are tried in their order, the plainer words first.

Sources: issues and pull requests by `owner/name#number`, source files of PyTorch by their path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from memfit.records import Verdict

Doubt = Literal["device", "shared"]
"""What has to be next to full: the device, or the host's shared memory (/dev/shm)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One message that tells how a trial ended."""

    name: str
    pattern: re.Pattern[str]
    verdict: Verdict
    doubt: Doubt | None
    """What has to be next to full for it to count; None where its words are unmistakable."""
    source: str


def _row(
    name: str,
    pattern: str,
    source: str,
    *,
    doubt: Doubt | None = None,
    verdict: Verdict = Verdict.OOM,
) -> Signature:
    return Signature(
        name=name,
        pattern=re.compile(pattern, re.IGNORECASE),
        verdict=verdict,
        doubt=doubt,
        source=source,
    )


_DEVICE = (
    _row("CUDA allocator", r"\bCUDA out of memory\b", "c10/cuda/CUDACachingAllocator.cpp"),
    _row(
        "CUDA asynchronous allocator",
        r"would exceed allowed memory\. \(out of memory\)",
        "c10/cuda/CUDAMallocAsyncAllocator.cpp",
    ),
    _row("CUDA runtime", r"\bCUDA error: out of memory", "mosaicml/composer#3397"),
    _row(
        "CUDA driver",
        r"\bCUDA driver error: out of memory|\bCUDA_ERROR_OUT_OF_MEMORY\b",
        "deepmodeling/deepmd-kit#5443",
    ),
    _row("CUDA runtime code", r"\bcudaErrorMemoryAllocation\b", "cudaError_t in CUDA's runtime"),
    _row("Triton", r"\bTriton Error \[\w+\]: out of memory", "triton, third_party/nvidia driver.c"),
    _row(
        "outside the allocator",
        r"ran out of memory outside PyTorch's allocator",
        "aten/src/ATen/native/cudnn/MHA.cpp",
    ),
    _row("cuBLAS", r"\bCUBLAS_STATUS_ALLOC_FAILED\b", "deepmodeling/deepmd-kit#5443"),
    _row(
        "cuSOLVER and cuSPARSE",
        r"\bCU(SOLVER|SPARSE)_STATUS_ALLOC_FAILED\b",
        "aten/src/ATen/cuda/Exceptions.cpp",
    ),
    _row(
        "cuDNN allocation",
        r"\bCUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)\b",
        "ultralytics/ultralytics#24569",
    ),
    _row("cuFFT allocation", r"\bCUFFT_ALLOC_FAILED\b", "aten/src/ATen/native/cuda/CuFFTUtils.h"),
    _row("HIP allocator", r"\bHIP out of memory\b", "EleutherAI/lm-evaluation-harness"),
    _row(
        "HIP runtime",
        r"\bHIP error: out of memory|\bhipErrorOutOfMemory\b",
        "c10/hip, made from c10/cuda/CUDAException.cpp",
    ),
    _row("XPU allocator", r"\bXPU out of memory\b", "open-edge-platform/geti#4872"),
    _row(
        "XPU platform",
        r"Allocation is out of device memory on current platform",
        "open-edge-platform/geti#4872",
    ),
    _row("MPS allocator", r"\bMPS backend out of memory\b", "huggingface/accelerate#4226"),
    _row(
        "NCCL",
        r"\bCuda failure(?: \d+)? 'out of memory'|\bFailed to CUDA (?:malloc|calloc)\b",
        "EleutherAI/lm-evaluation-harness#2458",
    ),
)
_DOUBTFUL = (
    _row(
        "cuBLAS handle",
        r"\bCUBLAS_STATUS_NOT_INITIALIZED when calling `?cublasCreate",
        "EleutherAI/lm-evaluation-harness#1689",
        doubt="device",
    ),
    _row(
        "cuDNN handle",
        r"\bCUDNN_STATUS_NOT_INITIALIZED\b",
        "haotian-liu/LLaVA#392",
        doubt="device",
    ),
    _row(
        "cuDNN internal",
        r"\bCUDNN_STATUS_INTERNAL_ERROR(?!_HOST_ALLOCATION)",
        "ultralytics/ultralytics#24569",
        doubt="device",
    ),
    _row(
        "cuDNN not supported",
        r"\bCUDNN_STATUS_NOT_SUPPORTED",
        "mosaicml/composer, trainer.py",
        doubt="device",
    ),
    _row(
        "cuDNN algorithm",
        r"Unable to find a valid cuDNN algorithm",
        "Lightning-AI/pytorch-lightning#5897",
        doubt="device",
    ),
    _row(
        "cuDNN engine",
        r"unable to find an engine to execute this computation",
        "ultralytics/ultralytics#24569",
        doubt="device",
    ),
    _row("cuFFT internal", r"\bCUFFT_INTERNAL_ERROR\b", "NVIDIA-NeMo/NeMo", doubt="device"),
    _row(
        "MIG",
        r"NVML_SUCCESS == .{1,80}INTERNAL ASSERT FAILED at .{1,300}CachingAllocator",
        "huggingface/accelerate#3803",
        doubt="device",
    ),
    _row(
        "allocator handles",
        r"handles_\.at\(i\) INTERNAL ASSERT FAILED at .{1,300}CachingAllocator"
        r"|\bCUDA driver error: device not ready",
        "mberr/torch-max-mem#45",
        doubt="device",
    ),
    _row(
        "NCCL without a reason",
        r"\bunhandled cuda error\b(?!(?s:.)*Cuda failure(?: \d+)? ')",
        "rwth-i6/returnn#1626",
        doubt="device",
    ),
)
_HOST = (
    _row(
        "host allocator",
        r"\bDefaultCPUAllocator: (?:can't allocate|not enough) memory",
        "c10/core/impl/alloc_cpu.cpp",
        verdict=Verdict.HOST_OOM,
    ),
    _row(
        "cuDNN host allocation",
        r"\bCUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED\b",
        "cudnn_graph.h, cuDNN 9",
        verdict=Verdict.HOST_OOM,
    ),
    _row(
        "C++ allocation",
        r"\bstd::bad_alloc\b",
        "what() of the C++ standard library",
        verdict=Verdict.HOST_OOM,
    ),
    _row(
        "host mapping",
        r"\bunable to mmap \d+ bytes from file .{1,300}: Cannot allocate memory"
        r"|\bunable to mmap memory: you tried",
        "pytorch/pytorch#92134",
        verdict=Verdict.HOST_OOM,
    ),
    _row(
        "shared memory",
        r"\bunable to allocate shared memory\(shm\) for file\b"
        r"|\bunable to write to file <?/torch_.{1,300}: No space left on device",
        "aten/src/ATen/MapAllocator.cpp",
        verdict=Verdict.HOST_OOM,
    ),
    _row(
        "bus error",
        r"DataLoader worker \(pid \d+\) is killed by signal: Bus error",
        "pytorch/pytorch#5247",
        doubt="shared",
        verdict=Verdict.HOST_OOM,
    ),
)
_SIZE = (
    _row(
        "32-bit index",
        r"\bINT_MAX elements|canUse32BitIndexMath|\b32-bit index"
        r"|\btoo large to fit into a \w*int\b|\bnumeric_limits<int(?:eger_t|32_t)?>::max\(\)"
        r"|> INT32_MAX is not supported|\bsupports dimension sizes up to 2147483647\b"
        r"|\bis too big to for CUB\b",
        "pytorch/pytorch#93599",
        verdict=Verdict.SIZE_LIMIT,
    ),
    _row(
        "too large for a kernel",
        r"\b(?:Input tensor|Output tensor|Weight tensor|Padded input tensor|Output size)"
        r" is too large\.|\b(?:tensor|input) too large or too many\b"
        r"|is too large for the channels_last CUDA kernel launch",
        "aten/src/ATen/native/cuda and native/cudnn/Conv_v8.cpp",
        verdict=Verdict.SIZE_LIMIT,
    ),
)
SIGNATURES: tuple[Signature, ...] = (*_DEVICE, *_HOST, *_SIZE, *_DOUBTFUL)
"""Every message that is known."""


def match(message: str, *, full: frozenset[Doubt] = frozenset()) -> Signature | None:
    """Return the signature that a message carries, or None.

    Args:
        message: Text of an exception.
        full: What was next to full when it was raised.
    """
    for signature in SIGNATURES:
        if signature.pattern.search(message) and (
            signature.doubt is None or signature.doubt in full
        ):
            return signature
    return None
