"""Peaks of training where the other tests are: a marker that limits them, a fixture that tells.

    @pytest.mark.memfit_limit("22GiB", target="model.py", device="rtx-4090", microbatch=8)
    def test_training_fits_the_card(): ...

    def test_the_second_half_is_cheap(memfit_peaks):
        peaks = memfit_peaks("model.py", device="rtx-4090", microbatch=8, parameters={"layers": 6})
        assert peaks.allocated_bytes < 8 * 2**30

pytest loads this by itself where memfit is installed. A machine that cannot judge, for want of a
CUDA build of torch or of a compiler, fails: a limit that nobody looked at is not kept. Files are
found from the test's own folder and from the folder that pytest was started in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memfit.errors import MemfitError, UsageError
from memfit.records import Precision, Verdict
from memfit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memfit.baseline import Setting
    from memfit.measure import Bench
    from memfit.records import Ledger, TrialResult

_MARKER = (
    "memfit_limit(limit, *, target, device, microbatch=1, accumulation_steps=2, precision='fp32', "
    "parameters=None, replicas=1, clip_norm=None): fail when training the workload uses more of "
    "the device than `limit`, such as '22GiB'"
)
_STEPS = 2
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Peaks of one group of a workload, in bytes of its most loaded device."""

    fits: bool
    """Whether it ran; the figures of what does not fit are those up to the failure."""
    virtual: bool
    """Whether the device was imitated: kernels were not executed."""
    allocated_bytes: int | None
    reserved_bytes: int | None
    used_bytes: int | None
    """Everything that the device had in use, the context included."""
    phases: Mapping[str, int | None]
    """Peak allocated of `build`, `forward`, `backward` and `optimizer_step`."""
    text: str
    """How the trial ended."""
    _explain: Callable[[], TrialResult]

    @property
    def ledger(self) -> Ledger | None:
        """What the peaks are made of, block by block; measured when it is first asked for."""
        return self._explain().ledger if self.fits else None


class _Session:
    """Workloads that are imported and kept for other tests, and what was measured of them."""

    def __init__(self) -> None:
        self._benches: dict[tuple[Any, ...], Bench] = {}
        self._peaks: dict[tuple[Any, ...], Peaks] = {}

    def measure(self, setting: Setting) -> Peaks:
        """Measure a group, once in a session."""
        key = (
            tuple(sorted(setting.parameters.items())),
            *(getattr(setting, n) for n in setting.__dataclass_fields__ if n != "parameters"),
        )
        if key not in self._peaks:
            self._peaks[key] = self._measure(setting)
        return self._peaks[key]

    def _measure(self, setting: Setting) -> Peaks:
        from memfit.explain import workload_error  # noqa: PLC0415
        from memfit.measure import peaks_of  # noqa: PLC0415
        from memfit.records import DeviceKind  # noqa: PLC0415

        bench = self._bench(setting)
        trial = bench.run(setting)
        if trial.verdict is not Verdict.FITS and not trial.verdict.limits_size:
            raise workload_error(trial, setting.target, earlier=(), kept=None)
        kept: list[TrialResult] = []

        def explain() -> TrialResult:
            if not kept:
                kept.append(bench.explain(setting, trial))
            return kept[0]

        phases: dict[str, int | None] = {}
        for device in trial.devices:
            for phase in peaks_of(device).phases:
                found = [v for v in (phases.get(phase.phase), phase.allocated_bytes) if v]
                phases[phase.phase] = max(found, default=None)
        return Peaks(
            fits=trial.verdict is Verdict.FITS,
            virtual=bench.device.kind is DeviceKind.VIRTUAL,
            allocated_bytes=trial.peak_allocated_bytes,
            reserved_bytes=trial.peak_reserved_bytes,
            used_bytes=max(
                (d.device_used_bytes for d in trial.devices if d.device_used_bytes is not None),
                default=None,
            ),
            phases=phases,
            text=trial.evidence.text,
            _explain=explain,
        )

    def _bench(self, setting: Setting) -> Bench:
        from memfit.measure import Bench  # noqa: PLC0415

        key = (setting.target, tuple(sorted(setting.parameters.items())), setting.device)
        if key not in self._benches:
            bench = Bench(setting.target, setting.parameters, setting.device)
            bench.__enter__()  # left in `close`, at the end of the session
            self._benches[key] = bench
        return self._benches[key]

    def close(self) -> None:
        """End every process."""
        for bench in self._benches.values():
            bench.__exit__()
        self._benches.clear()


_SESSION = pytest.StashKey[_Session]()


def pytest_configure(config: pytest.Config) -> None:
    """Announce the marker."""
    config.addinivalue_line("markers", _MARKER)
    config.stash[_SESSION] = _Session()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes of all workloads."""
    session = config.stash.get(_SESSION, None)
    if session is not None:
        session.close()


def pytest_runtest_call(item: pytest.Item) -> None:
    """Hold a test's workloads against their limits before the test itself runs."""
    for marker in item.iter_markers("memfit_limit"):
        _hold(item, marker)


def _hold(item: pytest.Item, marker: pytest.Mark) -> None:
    given = dict(marker.kwargs)
    words = marker.args or (given.pop("limit", None),)
    if len(words) != 1 or not isinstance(words[0], str | int):
        pytest.fail(f"memfit_limit takes one limit: {_MARKER}", pytrace=False)
    try:
        limit = words[0] if isinstance(words[0], int) else parse_bytes(words[0])
        setting = _setting(item, **given)
        peaks = item.config.stash[_SESSION].measure(setting)
    except TypeError as error:
        pytest.fail(f"memfit_limit: {error}; {_MARKER}", pytrace=False)
    except MemfitError as error:
        pytest.fail(_error_words(error), pytrace=False)
    used = peaks.used_bytes if peaks.used_bytes is not None else peaks.allocated_bytes
    virtual = " (virtual)" if peaks.virtual else ""
    group = f"{setting.accumulation_steps} microbatches of {setting.microbatch}"
    what = f"{setting.name}: {group}{virtual}"
    if not peaks.fits:
        pytest.fail(f"{what} do not fit on the device: {peaks.text}", pytrace=False)
    if used is None or used > limit:
        told = "not measured" if used is None else format_bytes(used)
        pytest.fail(
            f"{what} use {told} of the device, and the limit is {format_bytes(limit)}"
            + _largest(peaks),
            pytrace=False,
        )


def _largest(peaks: Peaks) -> str:
    """The largest rows of the ledger, a line each."""
    ledger = peaks.ledger
    if ledger is None:
        return ""
    at = ledger.highest
    rows = sorted(ledger.rows, key=lambda row: -row.bytes[at])[:_SHOWN]
    lines = [
        "  "
        + ", ".join(
            w for w in (f"{format_bytes(r.bytes[at])} {r.category}", r.module, r.place) if w
        )
        for r in rows
    ]
    return "\n".join(["; the most of it:", *lines])


def _error_words(error: MemfitError) -> str:
    parts = [error.details, error.message, f"hint: {error.hint}" if error.hint else None]
    return "\n".join(part for part in parts if part)


@pytest.fixture
def memfit_peaks(request: pytest.FixtureRequest) -> Iterator[Callable[..., Peaks]]:
    """Return a function that measures a workload and returns its `Peaks`.

    It takes what the marker `memfit_limit` takes, without the limit. Equal questions are measured
    once in a session.
    """

    def measure(target: str, **settings: Any) -> Peaks:
        session: _Session = request.config.stash[_SESSION]
        try:
            return session.measure(_setting(request.node, target=target, **settings))
        except MemfitError as error:
            pytest.fail(_error_words(error), pytrace=False)

    yield measure  # noqa: PT022 - a generator, so that the type says what a fixture is


def _setting(
    item: Any,
    *,
    target: str,
    device: str,
    microbatch: int = 1,
    accumulation_steps: int = _STEPS,
    precision: str = "fp32",
    parameters: Mapping[str, Any] | None = None,
    replicas: int = 1,
    clip_norm: float | None = None,
) -> Setting:
    from memfit.baseline import Setting  # noqa: PLC0415
    from memfit.measure import check_setting  # noqa: PLC0415

    if precision not in list(Precision):
        raise UsageError(f"{precision!r} is no precision", hint=f"use {', '.join(Precision)}")
    setting = Setting(
        target=_found(target, Path(item.path).parent),
        parameters={key: str(value) for key, value in (parameters or {}).items()},
        device=device,
        precision=Precision(precision),
        microbatch=microbatch,
        accumulation_steps=accumulation_steps,
        replicas=replicas,
        clip_norm=clip_norm,
    )
    check_setting(setting)
    return setting


def _found(target: str, folder: Path) -> str:
    """Take a file from the test's folder where it is there; else leave the words as they are."""
    location, colon, name = target.partition(":")
    beside = folder / location
    if location.endswith(".py") and beside.is_file():
        try:
            beside = beside.relative_to(Path.cwd())
        except ValueError:
            return f"{beside}{colon}{name}"
        return f"{beside}{colon}{name}"
    return target
