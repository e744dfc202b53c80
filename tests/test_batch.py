"""Arithmetic of the logical batch."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.batch import Candidates, candidates, divisors, poor_split_note, weights
from memfit.errors import UsageError
from memfit.records import Policy, Split


def of(
    logical_batch: int | None = None,
    *,
    replicas: int = 1,
    policy: Policy = Policy.EXACT,
    min_microbatch: int = 1,
    max_microbatch: int | None = None,
) -> Candidates:
    return candidates(
        logical_batch=logical_batch,
        replicas=replicas,
        policy=policy,
        min_microbatch=min_microbatch,
        max_microbatch=max_microbatch,
    )


def test_exact_offers_the_divisors_of_a_replicas_share() -> None:
    assert of(48).sizes == (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)
    assert of(48, replicas=4).sizes == (1, 2, 3, 4, 6, 12)
    assert of(48, max_microbatch=7).sizes == (1, 2, 3, 4, 6)
    assert of(479).sizes == (1, 479)
    assert of(1).sizes == (1,)


def test_exact_splits_are_uniform() -> None:
    assert of(480, replicas=4).split(20) == Split(
        microbatch=20, accumulation_steps=6, replicas=4, logical_batch=480
    )


def test_ragged_offers_the_largest_of_nearly_equal_parts() -> None:
    sizes = of(64, policy=Policy.RAGGED, max_microbatch=23)
    assert sizes.sizes == (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 22)
    assert sizes.split(22).sizes == (22, 21, 21)


def test_without_a_logical_batch_a_group_has_two_microbatches() -> None:
    sizes = of(replicas=2)
    assert sizes.split(5) == Split(microbatch=5, accumulation_steps=2, replicas=2)
    assert sizes.split(5).sizes == (5, 5)
    assert sizes.per_replica is None


def test_without_a_logical_batch_the_steps_are_fine() -> None:
    sizes = of().sizes
    assert sizes[:128] == tuple(range(1, 129))
    assert sizes[-1] == 65536
    assert len(sizes) == 704
    assert all(above - below <= 0.016 * below for below, above in itertools.pairwise(sizes[127:]))


def test_the_cap_itself_is_a_candidate() -> None:
    assert of(max_microbatch=1001).sizes[-3:] == (992, 1000, 1001)
    assert of(max_microbatch=1).sizes == (1,)
    assert of(max_microbatch=128).sizes == tuple(range(1, 129))


def test_the_smallest_size_that_was_asked_for_is_the_first_candidate() -> None:
    assert of(48, min_microbatch=2, max_microbatch=7).sizes == (2, 3, 4, 6)
    assert of(48, min_microbatch=5).sizes == (6, 8, 12, 16, 24, 48)
    assert of(7, min_microbatch=2).sizes == (7,)
    assert of(min_microbatch=2, max_microbatch=5).sizes == (2, 3, 4, 5)
    assert of(min_microbatch=129, max_microbatch=133).sizes == (129, 130, 132, 133)
    assert of(min_microbatch=5, max_microbatch=5).sizes == (5,)


def test_no_part_of_a_ragged_split_is_below_the_smallest_size() -> None:
    sizes = of(9, policy=Policy.RAGGED, min_microbatch=2)
    assert sizes.sizes == (3, 5, 9)  # at most 2 at a time, 9 examples are 2, 2, 2, 2 and 1
    assert sizes.split(5).sizes == (5, 4)


@given(
    share=st.integers(1, 3000),
    policy=st.sampled_from(Policy),
    min_microbatch=st.integers(1, 3000),
)
def test_the_smallest_size_leaves_out_exactly_the_splits_that_go_below_it(
    share: int, policy: Policy, min_microbatch: int
) -> None:
    every = of(share, policy=policy)
    kept = [m for m in every.sizes if min(every.split(m).sizes) >= min_microbatch]
    if kept:
        assert list(of(share, policy=policy, min_microbatch=min_microbatch).sizes) == kept
    else:
        with pytest.raises(UsageError, match="cannot be cut"):
            of(share, policy=policy, min_microbatch=min_microbatch)


@given(
    share=st.integers(1, 5000),
    replicas=st.integers(1, 9),
    policy=st.sampled_from(Policy),
    max_microbatch=st.none() | st.integers(1, 5000),
)
def test_every_split_keeps_the_logical_batch(
    share: int, replicas: int, policy: Policy, max_microbatch: int | None
) -> None:
    logical_batch = share * replicas
    sizes = of(logical_batch, replicas=replicas, policy=policy, max_microbatch=max_microbatch)
    assert list(sizes.sizes) == sorted(set(sizes.sizes))
    for size in sizes.sizes:
        split = sizes.split(size)
        assert sum(split.sizes) * replicas == logical_batch
        assert max(split.sizes) == size == split.microbatch
        assert max(split.sizes) - min(split.sizes) <= (policy is Policy.RAGGED)
        assert max_microbatch is None or size <= max_microbatch


@given(st.integers(1, 3000))
def test_candidates_are_complete(share: int) -> None:
    assert of(share).sizes == tuple(m for m in range(1, share + 1) if share % m == 0)
    parts = {-(-share // steps) for steps in range(1, share + 1)}
    assert of(share, policy=Policy.RAGGED).sizes == tuple(sorted(parts))


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("logical_batch", [10**7, 9_999_991, 10**9])
def test_large_logical_batches_are_cheap(policy: Policy, logical_batch: int) -> None:
    start = time.perf_counter()
    sizes = of(logical_batch, policy=policy)
    assert sizes.largest == logical_batch
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("number", [1, 2, 12, 97, 479, 360_360, 999_999_937])
def test_divisors(number: int) -> None:
    found = divisors(number)
    assert found[0] == 1
    assert found[-1] == number
    assert all(number % divisor == 0 for divisor in found)
    assert list(found) == sorted(set(found))


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"logical_batch": 6, "replicas": 8}, "batch of 6 leaves some of 8 replicas", "is 8"),
        ({"logical_batch": 100, "replicas": 8}, "100 cannot be shared .* 4 would", "96 and 104"),
        ({"logical_batch": 0}, "the logical batch is 0", None),
        ({"logical_batch": -4}, "the logical batch is -4", None),
        ({"logical_batch": 10**9 + 1}, "largest accepted is 1000000000", None),
        ({"replicas": 0}, "the number of replicas is 0", None),
        ({"max_microbatch": 0}, "the largest microbatch is 0", None),
        ({"min_microbatch": 0}, "the smallest microbatch is 0", None),
        ({"min_microbatch": 3, "max_microbatch": 2}, "is 3, above the largest of 2", "lower"),
        ({"min_microbatch": 65537}, "is 65537, above the largest of 65536", "--max-microbatch"),
        (
            {"logical_batch": 8, "replicas": 4, "min_microbatch": 3},
            "3 or more cannot be cut from the 2 examples",
            "to 2 or raise --logical-batch",
        ),
        (
            {"logical_batch": 8, "min_microbatch": 5, "max_microbatch": 7},
            "no split of 8 examples has all its microbatches from 5 to 7",
            "is 8: raise",
        ),
    ],
)
def test_wrong_words(options: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        of(**options)
    assert hint is None or (raised.value.hint and hint in raised.value.hint)


@pytest.mark.parametrize(
    ("sizes", "microbatch", "message", "hint"),
    [
        (of(480), 7, "does not divide the 480 examples", "6 and 8"),
        (of(480), 481, "the largest size to consider is 480", "480"),
        (of(64, policy=Policy.RAGGED), 23, "no equal split of 64", "22 and 32"),
        (of(), 129, "none of the sizes", "128 and 130"),
        (of(480), 0, "the smallest size to consider is 1", "1"),
        (of(480, min_microbatch=4), 2, "the smallest size to consider is 4", "4"),
    ],
)
def test_a_size_that_is_no_candidate(
    sizes: Candidates, microbatch: int, message: str, hint: str | None
) -> None:
    assert microbatch not in sizes
    with pytest.raises(UsageError, match=message) as raised:
        sizes.split(microbatch)
    assert raised.value.hint is not None
    assert raised.value.hint.endswith(f": {hint}")


def test_a_poor_ladder_is_told() -> None:
    note = poor_split_note(of(479), microbatch=1, room=23)
    assert note == (
        (
            "microbatch 1 is the largest divisor of 479 below 479, though about 23 would fit; "
            "no size from 2 to 478 divides 479"
        ),
        (
            "--policy ragged keeps the logical batch 479 with microbatches of at most 23; "
            "the nearest logical batch with a better split is 480"
        ),
    )


def test_a_poor_ladder_is_told_for_replicas_and_without_a_known_room() -> None:
    note = poor_split_note(of(958, replicas=2), microbatch=1)
    assert note is not None
    assert note[1] == (
        "--policy ragged keeps the logical batch 958; "
        "the nearest logical batch with a better split is 960"
    )


@pytest.mark.parametrize(
    ("sizes", "microbatch", "room"),
    [
        (of(480), 20, 23),
        (of(512), 16, 31),
        (of(479), 479, None),
        (of(479, policy=Policy.RAGGED), 1, 23),
        (of(479), 1, 1),
        (of(479, max_microbatch=1), 1, 23),
        (of(), 4, 9),
        (of(480), 20, None),
    ],
)
def test_a_good_split_needs_no_note(sizes: Candidates, microbatch: int, room: int | None) -> None:
    assert poor_split_note(sizes, microbatch=microbatch, room=room) is None


@given(share=st.integers(2, 4000), room=st.none() | st.integers(1, 4000))
def test_the_better_logical_batch_is_better(share: int, room: int | None) -> None:
    sizes = of(share)
    for microbatch in sizes.sizes[:3]:
        note = poor_split_note(sizes, microbatch=microbatch, room=room)
        if note is not None and room is not None and "nearest" in note[1]:
            better = int(note[1].rsplit(" ", 1)[1])
            following = next(m for m in sizes.sizes if m > microbatch)
            reach = min(room, following - 1)
            assert any(microbatch < m <= reach for m in divisors(better))


def test_weights_make_the_mean_over_elements() -> None:
    # 512 tokens at mean 2 and 1,536 at mean 4: the mean of all 2,048 is 3.5, not 3.
    assert weights([512, 1536]) == (0.25, 0.75)
    assert sum(w * mean for w, mean in zip(weights([512, 1536]), (2, 4), strict=True)) == 3.5


def test_weights_over_replicas_undo_the_average() -> None:
    # The other replica has 1,000 of 3,000 elements. DDP averages, so each contributes twice.
    assert weights([500, 1500], total=3000, replicas=2) == pytest.approx((1 / 3, 1.0))


def test_equal_counts_divide_by_the_accumulation_steps() -> None:
    assert weights([8, 8, 8, 8]) == (0.25,) * 4
    assert weights([8] * 4, total=64, replicas=2) == (0.25,) * 4


@given(
    groups=st.lists(
        st.lists(st.integers(0, 10**6), min_size=1, max_size=6), min_size=1, max_size=4
    ).filter(lambda groups: any(map(any, groups)))
)
def test_weighted_means_average_to_the_mean_of_everything(groups: list[list[int]]) -> None:
    total = sum(map(sum, groups))
    parts = [sum(weights(group, total=total, replicas=len(groups))) for group in groups]
    assert sum(parts) / len(groups) == pytest.approx(1)


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ([4, -1], {}, "counts -1 elements"),
        ([float("nan")], {}, "counts nan elements"),
        ([0, 0], {}, "has 0 elements"),
        ([], {}, "has 0 elements"),
        ([4], {"replicas": 2}, "over 2 replicas need the elements of all"),
        ([4, 4], {"total": 7}, "total is 7, less than the 8"),
        ([4], {"total": float("inf")}, "inf elements"),
        ([4], {"replicas": 0, "total": 4}, "replicas is 0"),
    ],
)
def test_wrong_counts(counts: list[float], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        weights(counts, **options)
