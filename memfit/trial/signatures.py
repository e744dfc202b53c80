"""What running out of memory looks like in words: a table of messages and where each was seen.

Exception classes come first and are told apart in `classify`; this table is for the rest. A
`doubtful` signature also has other causes, and counts only when the device was nearly full.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from memfit.records import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One message that tells how a trial ended."""

    name: str
    pattern: re.Pattern[str]
    verdict: Verdict
    doubtful: bool
    source: str


def _row(
    name: str, pattern: str, source: str, *, doubtful: bool = False, verdict: Verdict = Verdict.OOM
) -> Signature:
    return Signature(
        name=name,
        pattern=re.compile(pattern, re.IGNORECASE),
        verdict=verdict,
        doubtful=doubtful,
        source=source,
    )


SIGNATURES: tuple[Signature, ...] = (
    _row("CUDA allocator", r"\bCUDA out of memory\. Tried to allocate", "c10/cuda allocator"),
    _row("CUDA runtime", r"CUDA error: out of memory", "mosaicml/composer#3397"),
    _row("CUDA driver", r"CUDA driver error: out of memory", "deepmodeling/deepmd-kit"),
    _row("cuBLAS", r"CUBLAS_STATUS_ALLOC_FAILED", "deepmodeling/deepmd-kit#5443"),
    _row("HIP allocator", r"\bHIP out of memory\.", "EleutherAI/lm-evaluation-harness"),
    _row("XPU allocator", r"\bXPU out of memory\.", "open-edge-platform/geti#4872"),
    _row("XPU platform", r"Allocation is out of device memory on current platform", "geti#4872"),
    _row("MPS allocator", r"MPS backend out of memory", "huggingface/accelerate#4226"),
    _row("NCCL", r"Cuda failure.{0,20}out of memory", "EleutherAI/lm-evaluation-harness#2458"),
    _row("cuDNN allocation", r"CUDNN_STATUS_ALLOC_FAILED", "ultralytics/ultralytics#24569"),
    _row(
        "cuDNN internal",
        r"CUDNN_STATUS_INTERNAL_ERROR",
        "ultralytics/ultralytics#24569",
        doubtful=True,
    ),
    _row(
        "cuDNN not supported",
        r"CUDNN_STATUS_NOT_SUPPORTED",
        "mosaicml/composer",
        doubtful=True,
    ),
    _row(
        "cuDNN algorithm",
        r"Unable to find a valid cuDNN algorithm",
        "Lightning-AI/pytorch-lightning#5897",
        doubtful=True,
    ),
    _row(
        "cuDNN engine",
        r"unable to find an engine to execute this computation",
        "ultralytics/ultralytics#24569",
        doubtful=True,
    ),
    _row("cuFFT", r"CUFFT_(INTERNAL_ERROR|ALLOC_FAILED)", "NVIDIA-NeMo/NeMo", doubtful=True),
    _row(
        "MIG",
        r"NVML_SUCCESS == r INTERNAL ASSERT FAILED.*CUDACachingAllocator",
        "huggingface/accelerate#3803",
        doubtful=True,
    ),
    _row(
        "host allocator",
        r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",
        "c10/core/impl/alloc_cpu",
        verdict=Verdict.HOST_OOM,
    ),
    _row(
        "32-bit index",
        r"INT_MAX elements|canUse32BitIndexMath|too large for 32-bit index",
        "pytorch/pytorch#93599",
        verdict=Verdict.SIZE_LIMIT,
    ),
)


def match(message: str, *, nearly_full: bool) -> Signature | None:
    """Return the signature that a message carries, or None.

    Args:
        message: Text of an exception.
        nearly_full: Whether the device had next to no free memory when it was raised.
    """
    for signature in SIGNATURES:
        if signature.pattern.search(message) and (nearly_full or not signature.doubtful):
            return signature
    return None
