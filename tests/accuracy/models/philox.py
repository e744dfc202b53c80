"""The numbers that PyTorch's CUDA generator makes, computed on the CPU.

A benchmark that seeds its generator routes the same tokens to the same experts on every card with
as many multiprocessors, so its routing can be known without the card. The generator is Philox 4x32
with ten rounds (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011), one subsequence
per thread, as cuRAND's device functions read it; PyTorch gives each thread four numbers a round.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_BITS = np.uint64(32)
_THREADS = 256
_A_ROUND = 4
"""Numbers that a thread makes at once."""
_BLOCKS_PER_SM = 8
"""2,048 threads of a multiprocessor, in blocks of 256; a card of compute capability 8.0 or 9.0."""

Words = npt.NDArray[np.uint64]


class Generator:
    """A seeded generator of a card, whose offset moves with every tensor it fills."""

    def __init__(self, seed: int, *, sms: int) -> None:
        self._seed = seed
        self._sms = sms
        self._offset = 0

    def skip(self, count: int) -> None:
        """Fill a tensor of so many elements, and forget it."""
        self._advance(count)

    def randn(self, count: int) -> npt.NDArray[np.float64]:
        """Fill a tensor of so many elements with normal numbers."""
        offset = self._offset
        threads, rounds = self._advance(count)
        values = np.empty((rounds, _A_ROUND, threads))
        for number in range(rounds):
            words = _philox(self._seed, np.arange(threads, dtype=np.uint64), offset // 4 + number)
            values[number, 0], values[number, 1] = _normal(words[0], words[1])
            values[number, 2], values[number, 3] = _normal(words[2], words[3])
        return values.reshape(-1)[:count]

    def randint(self, high: int, count: int) -> npt.NDArray[np.uint64]:
        """Fill a tensor of so many elements with integers from zero up to a small limit."""
        offset = self._offset
        threads, rounds = self._advance(count)
        values = np.empty((rounds, _A_ROUND, threads), dtype=np.uint64)
        for number in range(rounds):
            words = _philox(self._seed, np.arange(threads, dtype=np.uint64), offset // 4 + number)
            values[number] = np.stack(words) % np.uint64(high)
        return values.reshape(-1)[:count]

    def _advance(self, count: int) -> tuple[int, int]:
        blocks = min(self._sms * _BLOCKS_PER_SM, -(-count // _THREADS))
        threads = blocks * _THREADS
        rounds = -(-count // (threads * _A_ROUND))
        self._offset += rounds * _A_ROUND
        return threads, rounds


def _philox(seed: int, subsequence: Words, counter: int) -> list[Words]:
    key = [seed & 0xFFFFFFFF, seed >> 32]
    zeros = np.zeros_like(subsequence)
    words = [
        zeros + np.uint64(counter & 0xFFFFFFFF),
        zeros + np.uint64(counter >> 32),
        subsequence & _LOW,
        subsequence >> _BITS,
    ]
    for _ in range(_ROUNDS):
        first = words[0] * _MULTIPLIERS[0]
        second = words[2] * _MULTIPLIERS[1]
        words = [
            (second >> _BITS) ^ words[1] ^ np.uint64(key[0]),
            second & _LOW,
            (first >> _BITS) ^ words[3] ^ np.uint64(key[1]),
            first & _LOW,
        ]
        key = [(part + step) & 0xFFFFFFFF for part, step in zip(key, _KEY_STEPS, strict=True)]
    return words


def _normal(first: Words, second: Words) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Two words to two normal numbers, by Box and Muller."""
    radius = np.sqrt(-2 * np.log((first + 0.5) / 2**32))
    angle = 2 * np.pi * (second + 0.5) / 2**32
    return np.sin(angle) * radius, np.cos(angle) * radius
