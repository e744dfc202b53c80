"""The allocator's history replayed: how large each block was follows from the allocator's rules."""

from __future__ import annotations

import pytest

from memfit.trial.ledger_replay import Rules, replay
from memfit.units import MIB

SMALL, LARGE = 2 * MIB, 20 * MIB


def entry(action, address, size=0):
    return {"action": action, "addr": address, "size": size, "frames": ()}


def freed(address):
    return [entry("free_requested", address), entry("free_completed", address)]


@pytest.mark.parametrize(
    ("requested", "rounded"), [(0, 512), (1, 512), (512, 512), (513, 1024), (MIB, MIB)]
)
def test_requests_are_rounded_up_to_512_bytes(requested, rounded):
    assert Rules().round(requested) == rounded


@pytest.mark.parametrize(
    ("megabytes", "rounded"), [(1.0, 1.0), (1.1, 1.25), (1.25, 1.25), (1.3, 1.5), (3.1, 3.5)]
)
def test_divisions_of_powers_of_two_round_further(megabytes, rounded):
    rules = Rules.of({"roundup_power2_divisions": {"1": 4, "2": 4, "4": 0}})

    assert rules.round(int(megabytes * MIB)) == int(rounded * MIB)
    assert rules.round(int(4.1 * MIB)) == -(-int(4.1 * MIB) // 512) * 512


def test_a_large_block_keeps_a_remainder_of_up_to_one_mebibyte():
    trace = [entry("segment_alloc", 0, LARGE), entry("alloc", 0, LARGE - MIB)]
    block = replay(trace, Rules()).blocks[0]

    assert (block.size_bytes, block.remainder_bytes) == (LARGE, MIB)


def test_a_larger_remainder_is_split_off():
    trace = [entry("segment_alloc", 0, LARGE), entry("alloc", 0, LARGE - MIB - 512)]

    assert replay(trace, Rules()).blocks[0].remainder_bytes == 0


def test_small_blocks_are_always_split():
    trace = [entry("segment_alloc", 0, SMALL), entry("alloc", 0, SMALL - 512)]

    assert replay(trace, Rules()).blocks[0].size_bytes == SMALL - 512


def test_a_refused_request_moves_nothing():
    refused = {"action": "oom", "device_free": 0, "size": 40 * MIB, "stream": 0}
    trace = [entry("segment_alloc", 0, SMALL), entry("alloc", 0, 512), refused, *freed(0)]

    assert replay(trace, Rules()).levels == [0, 512, 0]


def test_blocks_above_the_split_limit_are_handed_out_whole():
    trace = [entry("segment_alloc", 0, LARGE), entry("alloc", 0, 12 * MIB)]

    assert replay(trace, Rules(max_split_bytes=10 * MIB)).blocks[0].size_bytes == LARGE


def test_a_freed_block_joins_its_free_neighbours():
    half = 9 * MIB
    trace = [
        entry("segment_alloc", 0, LARGE),
        entry("alloc", 0, half),
        entry("alloc", half, half),
        *freed(0),
        *freed(half),
        entry("alloc", 0, LARGE - MIB),
    ]

    assert replay(trace, Rules()).blocks[-1].size_bytes == LARGE


def test_segments_are_never_joined():
    trace = [
        entry("segment_alloc", 0, LARGE),
        entry("segment_alloc", LARGE, LARGE),
        entry("alloc", 0, LARGE),
        entry("alloc", LARGE, LARGE),
        *freed(LARGE),
        *freed(0),
        entry("alloc", 0, LARGE - 512),
    ]

    assert replay(trace, Rules()).blocks[-1].size_bytes == LARGE


def test_a_segment_that_went_back_and_came_again_is_new():
    trace = [
        entry("segment_alloc", 0, LARGE),
        entry("alloc", 0, LARGE),
        *freed(0),
        entry("segment_free", 0, LARGE),
        entry("segment_alloc", 0, 2 * LARGE),
        entry("alloc", 0, 2 * LARGE - MIB),
    ]

    assert replay(trace, Rules()).blocks[-1].size_bytes == 2 * LARGE


def test_a_block_counts_until_its_free_is_requested_and_its_memory_until_it_is_completed():
    trace = [
        entry("segment_alloc", 0, LARGE),
        entry("alloc", 0, 5 * MIB),
        entry("free_requested", 0),
        entry("alloc", 5 * MIB, 15 * MIB - 512),
        entry("free_completed", 0),
        *freed(5 * MIB),
        entry("alloc", 0, LARGE - 512),
    ]
    history = replay(trace, Rules())

    assert history.levels == [0, 5 * MIB, 0, 15 * MIB, 0, LARGE]
    assert history.highest(0, 3) == (15 * MIB, 3)
    assert [b.born for b in history.alive_at(5)] == [4]


def test_blocks_of_expandable_segments_are_what_was_asked_for():
    trace = [entry("segment_map", 0, LARGE), entry("alloc", 0, LARGE - 1024), *freed(0)]

    assert replay(trace, Rules(expandable=True)).levels == [0, LARGE - 1024, 0]
