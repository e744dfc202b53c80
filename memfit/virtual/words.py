"""What a process on the virtual GPU cannot know, in sentences a user understands.

Whole programs and memfit's own trials say the same about the same; the figures are the driver's
(see `control`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memfit.units import MIB, format_bytes

_MANY = 5
_RNN = "cudnnGetRNNTempSpaceSizes"


def invented(calls: int, names: Sequence[str], *, whose: str = "") -> Iterator[str]:
    """Say which results the driver had to make up, and what is known of them.

    Args:
        calls: How many calls there were.
        names: The functions that were called, in order of first use.
        whose: Words that name the process, such as ` of process 7`.
    """
    if not names:
        return
    shown = ", ".join(names[:_MANY])
    more = " and others" if len(names) > _MANY else ""
    yield (
        f"{calls} calls{whose} went to functions whose results the stand-in driver had to invent: "
        f"{shown}{more}."
    )
    if _RNN in names:
        yield (
            "cuDNN tells the workspace and reserve of its recurrent layers only to a process with "
            "a card: they were estimated from what it answers where it looks at none, the "
            "workspace within about a fifth. On a card it may choose another algorithm."
        )


def benchmark(tried: int, least: int, most: int) -> Iterator[str]:
    """Say what cuDNN's benchmark mode leaves open.

    Args:
        tried: Convolutions of which several plans were tried.
        least: The smallest workspace of the convolution whose plans differ most, in bytes.
        most: Its largest.
    """
    if tried == 0:
        return
    several = "convolution" if tried == 1 else "convolutions"
    yield (
        f"cuDNN's benchmark mode tried the plans of {tried:,} {several} and took all for equally "
        "fast, where a card picks by timings: while it tries, the largest workspace counts, as on "
        "a card; afterwards that of a single convolution may be anything from "
        f"{format_bytes(least)} to {format_bytes(most)}."
    )


def pool(rounding: int) -> Iterator[str]:
    """Say by how much the driver's own memory pools are counted too high.

    Args:
        rounding: Bytes of the peak that only round blocks up to whole pages.
    """
    if rounding >= MIB:
        yield (
            "Blocks of the driver's memory pools (cudaMallocAsync) count in whole pages of 2 MiB, "
            f"where a card packs several into one: up to {format_bytes(rounding)} of the peak are "
            "such rounding. What a card's pool keeps for later is not known."
        )
