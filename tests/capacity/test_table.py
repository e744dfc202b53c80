"""The line through measured peaks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memfit.capacity.table import CapacityPoint, fit_of
from memfit.records import Verdict
from memfit.units import GIB, MIB


def point(m: int, peak: int | None, *, trial: int = 1, steps: int = 2, **more) -> CapacityPoint:
    return CapacityPoint(
        **{
            "trial": trial,
            "microbatch": m,
            "accumulation_steps": steps,
            "verdict": Verdict.FITS,
            "peak_allocated_bytes": peak,
            "peak_bytes": peak,
            "demand_bytes": peak,
            **more,
        }
    )


@given(
    st.integers(0, 80 * GIB),
    st.integers(1, 2 * GIB),
    st.lists(st.integers(1, 4096), min_size=2, max_size=8, unique=True),
)
def test_points_on_a_line_give_that_line(intercept: int, slope: int, sizes: list[int]) -> None:
    fit = fit_of(tuple(point(m, intercept + slope * m) for m in sizes))

    assert fit is not None
    assert fit.points == len(sizes)
    assert abs(fit.slope_bytes - slope) <= 1
    assert abs(fit.intercept_bytes - intercept) <= 4096
    assert fit.residual_bytes <= 4096


def test_the_residual_names_the_point_that_lies_farthest() -> None:
    peaks = {1: 10 * MIB, 2: 20 * MIB, 3: 30 * MIB, 4: 64 * MIB}
    fit = fit_of(tuple(point(m, peak) for m, peak in peaks.items()))

    assert fit is not None
    assert fit.residual_microbatch in (3, 4)
    far = fit.residual_microbatch
    assert fit.residual_bytes == abs(peaks[far] - fit.at(far))


def test_two_points_have_no_residual() -> None:
    fit = fit_of((point(1, 5 * MIB), point(2, 7 * MIB)))

    assert fit is not None
    assert (fit.points, fit.residual_bytes) == (2, 0)
    assert (fit.intercept_bytes, fit.slope_bytes) == (3 * MIB, 2 * MIB)


def test_of_several_trials_of_a_size_the_highest_peak_counts() -> None:
    fit = fit_of((point(1, MIB), point(1, 2 * MIB, trial=2), point(2, 3 * MIB, trial=3)))

    assert fit is not None
    assert (fit.points, fit.slope_bytes) == (2, MIB)


def test_what_did_not_fit_or_held_no_gradients_is_left_out() -> None:
    points = (
        point(1, MIB),
        point(2, 9 * MIB, verdict=Verdict.OOM),
        point(4, 2 * MIB, steps=1),
        point(8, None),
    )
    assert fit_of(points) is None
