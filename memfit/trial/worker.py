"""The worker's side of a trial: build, run groups, read memory, report."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from memfit import allocator
from memfit.devices.memory import (
    CudaMemory,
    MemoryReader,
    Reading,
    least_request,
    open_reader,
    peak_resident_bytes,
)
from memfit.group import run_group
from memfit.records import (
    Composition,
    DeviceMemory,
    EvaluationPeak,
    Ledger,
    Observed,
    PhaseMemory,
    Precision,
    Timeline,
    TrialSpec,
)
from memfit.trial import lazy, libraries
from memfit.trial.checks import (
    CheckFailed,
    check_batch,
    check_count,
    check_gradients,
    check_model,
    check_optimizer,
    first_loss,
)
from memfit.trial.growth import GrowthRecorder
from memfit.trial.ledger_recorder import LedgerRecorder
from memfit.trial.noticing import Noticing
from memfit.trial.passes import evaluate, make_optimizer_state
from memfit.trial.phases import PhaseRecorder
from memfit.trial.protocol import (
    MARKS,
    Mark,
    ReadPass,
    WorkerFailure,
    WorkerReport,
    write_mark,
    write_report,
)
from memfit.trial.reads import TrialReads
from memfit.trial.settling import Settling
from memfit.trial.storages import parts_of
from memfit.trial.telling import describe_failure, host_build_note, limits_of
from memfit.trial.timeline import TimelineRecorder
from memfit.virtual import control
from memfit.workload import LoadedWorkload, Workload

_MORE_GROUPS_FOR_SCALER = 24
"""GradScaler starts at 2**16 and halves at every skipped step: 17 skips reach a scale below one."""


def run(loaded: LoadedWorkload, spec: TrialSpec, folder: Path, reads: ReadPass | None) -> NoReturn:
    """Run one trial in this process, leave its report in `folder`, and end the process."""
    trial = _Trial(loaded, spec, folder, reads)
    failure: WorkerFailure | None = None
    try:
        trial.run()
    except BaseException as error:  # noqa: BLE001 - whatever ends a trial is its result
        lazy.end_where_kernels_were_missing(error)
        failure = trial.describe(error)
    trial.reads.finish()
    write_report(folder, trial.report(failure))
    if control.active():
        libraries.leave_word(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries may abort while they unload; the report is written, so nothing is left to run.
    os._exit(0)


class _Trial:
    """One trial as it runs."""

    def __init__(
        self, loaded: LoadedWorkload, spec: TrialSpec, folder: Path, reads: ReadPass | None
    ) -> None:
        self.reads = TrialReads(reads, share=spec.data_dependent, folder=folder)
        self._works_values_out = reads == "record"
        self._loaded = loaded
        self._spec = spec
        self._marks = os.open(folder / MARKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._mark = Mark(phase="imported", group=0, microbatch=0)
        self._recorder: PhaseRecorder | None = None
        self._growth: GrowthRecorder | None = None
        self._noticing = Noticing()
        self._host_note: str | None = None
        self._evaluation: EvaluationPeak | None = None
        self._timeline: TimelineRecorder | None = None
        self._finished_timeline: Timeline | None = None
        self._ledger: LedgerRecorder | None = None
        self._finished_ledger: Ledger | None = None
        self._model: Any = None
        self._optimizer: Any = None
        self._failed_demand: int | None = None
        self._refused_at: Mark | None = None
        self._baseline = 0
        self._gradient_bytes = 0
        self._group = 0
        self._attempted = 0
        self._applied = 0
        self._settling: Settling | None = None
        self._write_mark("imported")

    # -- running -----------------------------------------------------------------------------

    def run(self) -> None:
        """Build the workload and run its groups."""
        import torch  # noqa: PLC0415

        torch.manual_seed(self._spec.seed)
        if self._spec.allocator is not None:
            allocator.apply(self._spec.allocator)
        reader = open_reader(self._spec.device)
        self._reader = reader
        self._noticing.others(self._real_gpu())
        if reader.device.type == "cuda":
            self._watch_allocator(reader)
        else:
            self._baseline = reader.read(device_used=True).device_used_bytes or 0
        self._write_mark("build")
        self.reads.begin()
        recorder = self._recorder = PhaseRecorder(reader)
        recorder.begin("build")
        if self._spec.record_ledger:
            self._ledger = LedgerRecorder.start(reader)
        with contextlib.ExitStack() as stack:
            self._enter(stack)
            workload = self._build(reader.device)
            self._write_mark("built")
            if self._spec.resumed:
                make_optimizer_state(self._model, self._optimizer)
            recorder.end()
            if self._ledger is not None:
                self._ledger.built(self._model)
            self._run_groups(workload, recorder)
        if reader.device.type == "cuda":
            torch.cuda.synchronize()
        if self._ledger is not None:
            self._finished_ledger = self._ledger.finish(recorder.phases())
        if not self._applied:
            raise CheckFailed(
                "no optimizer step",
                f"the scaler skipped the optimizer step in all {self._group} groups, "
                "so nothing was trained",
                hint="gradients overflow in fp16; try bf16, or look for a loss that is not finite",
            )

    def _run_groups(self, workload: Workload, recorder: PhaseRecorder) -> None:
        """Run the groups, and the evaluation pass where one was asked for."""
        import torch  # noqa: PLC0415

        reader = self._reader
        scaler = (
            torch.amp.GradScaler(reader.device.type)
            if self._spec.precision is Precision.FP16
            else None
        )
        recorder.groups = "first"
        self._settling = Settling(reader, self._spec.device.limit_bytes)
        self._growth = GrowthRecorder(reader, trace=self._spec.purpose == "trace")
        while self._wants_another_group():
            self._run_group(workload, scaler)
            self._growth.end_group()
            self._noticing.end_group(self._group)
        if self._spec.evaluate:
            self._write_mark("evaluate")
            self._evaluation = evaluate(workload, self._model, self._spec, reader)

    def _enter(self, stack: contextlib.ExitStack) -> None:
        """Enter what a workload is built and run in."""
        if self._works_values_out:
            from memfit.virtual.values import ValueMode  # noqa: PLC0415 - imports torch

            stack.enter_context(ValueMode(share=self._spec.data_dependent, note=self.reads.note))
        if self._spec.split.replicas > 1:
            from memfit.trial.replicas import copies  # noqa: PLC0415 - imports torch

            stack.enter_context(copies(self._spec.split.replicas))

    def _build(self, device: Any) -> Workload:
        import torch  # noqa: PLC0415

        workload = self._loaded.make()
        workload.device = device
        before = peak_resident_bytes()
        with torch.device(device):
            model = check_model(workload.model())
        self._model = model.to(device).train()
        if device.type != "cpu":
            self._host_note = host_build_note(peak_resident_bytes() - before)
        if self._spec.split.replicas > 1:
            from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

            mesh = init_device_mesh(device.type, (self._spec.split.replicas,))
            made = workload.parallelize(self._model, mesh)
            self._model = check_model(made, made_by="parallelize()")
        make = workload.optimizer if self._ledger is None else self._ledger.optimizer(workload)
        self._optimizer = check_optimizer(make(self._model))
        return workload

    def _wants_another_group(self) -> bool:
        done, asked = self._group, self._spec.groups
        if done < asked:
            return True
        if not self._applied:
            return done < asked + _MORE_GROUPS_FOR_SCALER
        if self._applied == 1:
            return True  # a group with the optimizer's state in place has not run yet
        settling = self._settling
        if settling is None or self._spec.record_ledger:
            return False  # a ledger is of what is allocated, however it is laid out
        return settling.wants_another(done - asked)

    def _run_group(self, workload: Workload, scaler: Any) -> None:
        assert self._recorder is not None
        assert self._settling is not None
        self._group += 1
        self.reads.begin_group()
        if self._applied:
            self._recorder.groups = "later"
        if self._spec.record_timeline and self._group == self._spec.groups:
            self._timeline = TimelineRecorder.start(self._reader)
        self._settling.begin_group()
        sizes = self._spec.sizes
        loss = workload.loss if self._group > 1 else first_loss(workload, self._spec)
        batches, counts = self._microbatches(workload, sizes)
        self._attempted += 1
        outcome = run_group(
            self._model,
            self._optimizer,
            batches,
            loss=loss if self._ledger is None else self._ledger.loss(loss),
            counts=counts,
            replicas=self._spec.split.replicas,
            device=self._reader.device,
            precision=self._spec.precision,
            scaler=scaler,
            clip_norm=self._spec.clip_norm,
            on_phase=self._on_phase,
        )
        self._applied += outcome.step_applied
        self._settling.end_group()
        if self._timeline is not None:
            self._finished_timeline = self._timeline.finish()
            self._timeline = None

    def _microbatches(self, workload: Workload, sizes: tuple[int, ...]) -> tuple[Any, list[int]]:
        """The group's microbatches and the elements of each.

        Counts must be known before the first backward, so a workload that counts its elements
        makes all microbatches of the group first, as a trainer that counts tokens does.
        """
        if not workload.counts_elements():
            return self._make_batches(workload, sizes), list(sizes)
        batches = list(self._make_batches(workload, sizes))
        counts = [
            check_count(workload.count(batch), size)
            for batch, size in zip(batches, sizes, strict=True)
        ]
        for count, size in zip(counts, sizes, strict=True):
            self._noticing.count(count, size)
        return batches, counts

    def _make_batches(self, workload: Workload, sizes: tuple[int, ...]) -> Iterator[Any]:
        for size in sizes:
            batch = workload.batch(size)
            check_batch(batch, size)
            self._noticing.batch(batch, size)
            yield batch

    # -- phases ------------------------------------------------------------------------------

    def _on_phase(self, phase: str, microbatch: int | None) -> None:
        assert self._recorder is not None
        self.reads.begin_phase()
        if phase == "group_done":
            self._recorder.end()
        else:
            self._recorder.begin(phase)  # type: ignore[arg-type]
        if self._ledger is not None:
            self._ledger.phase(phase, self._recorder.groups, self._optimizer)
        if phase == "optimizer_step":
            gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
            self._gradient_bytes = self._bytes_of(gradients)
            if self._group == 1:
                check_gradients(self._model, self._spec)
        if self._timeline is not None:
            self._timeline.begin(phase, microbatch)
        self._write_mark(phase, 0 if microbatch is None else microbatch + 1)

    def _write_mark(self, phase: str, microbatch: int = 0) -> None:
        self._mark = Mark(phase=phase, group=self._group, microbatch=microbatch)
        write_mark(self._marks, self._mark)

    # -- memory ------------------------------------------------------------------------------

    def _watch_allocator(self, reader: MemoryReader) -> None:
        """Note what the allocator held at the moment a request failed."""
        import torch  # noqa: PLC0415

        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)  # noqa: SLF001
        if attach is None:
            return

        def observe(device: int, requested: int, total: int, free: int) -> None:  # noqa: ARG001
            reading = reader.read(device_used=True)
            if reading.allocated_bytes is not None:
                outside = reading.outside_allocator_bytes or 0
                least = least_request(requested)
                self._failed_demand = reading.allocated_bytes + least + outside
            self._refused_at = self._mark

        attach(observe)

    def _bytes_of(self, tensors: list[Any]) -> int:
        """Bytes of the distinct storages of these tensors on the trial's device."""
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for tensor in tensors
            for t in parts_of(tensor)
            if t.device.type == self._reader.device.type
        }
        return sum(self._reader.block_bytes(size) for size in storages.values())

    def _composition(self, phases: tuple[PhaseMemory, ...]) -> Composition | None:
        on_cpu = self._reader.device.type == "cpu"
        peaks = [
            (p.device_used_bytes if on_cpu else p.peak_allocated_bytes, index, p)
            for index, p in enumerate(phases)
        ]
        known = [peak for peak in peaks if peak[0] is not None]
        if not known or self._model is None:
            return None
        peak, _, where = max(known, key=lambda item: (item[0] or 0, -item[1]))
        total = self._failed_demand if self._failed_demand is not None else peak or 0
        alone = len(self._spec.sizes) == 1 and where.phase in ("forward", "backward")
        resident = 0 if alone or where.groups == "none" else self._gradient_bytes
        states = [] if where.groups == "none" else self._optimizer_tensors()
        if where.groups == "first" and where.phase != "optimizer_step":
            states = []
        parameters = self._bytes_of(list(self._model.parameters()))
        buffers = self._bytes_of(list(self._model.buffers()))
        state = self._bytes_of(states)
        rest = total - parameters - buffers - resident - state - self._baseline
        return Composition(
            phase=self._mark.phase if self._failed_demand is not None else where.phase,
            parameters_bytes=parameters,
            buffers_bytes=buffers,
            gradients_bytes=resident,
            optimizer_state_bytes=state,
            activations_bytes=max(rest, 0),
            baseline_bytes=self._baseline + min(rest, 0),
        )

    def _optimizer_tensors(self) -> list[Any]:
        import torch  # noqa: PLC0415

        state = getattr(self._optimizer, "state", {})
        return [
            value
            for entry in state.values()
            if isinstance(entry, dict)
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        ]

    # -- reporting ---------------------------------------------------------------------------

    def describe(self, error: BaseException) -> WorkerFailure:
        """Turn whatever ended the trial into words, without keeping its frames."""
        return describe_failure(
            error,
            free_bytes=self._free_bytes(),
            demand_bytes=self._failed_demand,
            refused_here=self._refused_at == self._mark or self._flushed_here(),
        )

    def _free_bytes(self) -> int | None:
        """Free memory of the device, or what is left of the limit where that is less."""
        reader = getattr(self, "_reader", None)
        if reader is None or reader.device.type != "cuda":
            return None
        import torch  # noqa: PLC0415

        try:
            free, total = torch.cuda.mem_get_info(reader.device)
        except RuntimeError:  # a context that an earlier error has broken answers nothing
            return None
        return max(min(free, self._spec.device.limit_bytes - (total - free)), 0)

    def _flushed_here(self) -> bool:
        """Whether the allocator had to flush its cache in the phase that failed.

        It does so before it gives up, also where it then fails to say why (MIG, NCCL).
        """
        if self._recorder is None or self._recorder.current is None:
            return False
        with contextlib.suppress(RuntimeError):
            now = self._reader.read(device_used=False).alloc_retries
            return now is not None and now > (self._recorder.retries or 0)
        return False

    def report(self, failure: WorkerFailure | None) -> WorkerReport:
        """Collect what was measured."""
        if failure is None or not failure.refused_here:
            self._failed_demand = None  # of a refusal that the workload survived
        devices: list[DeviceMemory] = []
        composition = None
        if self._recorder is not None:
            with contextlib.suppress(RuntimeError):
                last = self._recorder.end() or self._reader.read(device_used=True)
                phases = self._recorder.phases()
                devices = [self._device(phases, last)]
                if failure is None or self._failed_demand is not None:
                    composition = self._composition(phases)
        return WorkerReport(
            devices=devices,
            composition=composition,
            timeline=self._finished_timeline,
            ledger=self._finished_ledger,
            observed=self._observed(),
            groups_run=self._group if failure is None else max(self._group - 1, 0),
            optimizer_steps_attempted=self._attempted,
            optimizer_steps_applied=self._applied,
            limits=[
                *limits_of(self._model, self._spec, self.reads),
                *([self._host_note] if self._host_note else []),
            ],
            failure=failure,
        )

    def _observed(self) -> Observed:
        """What was seen beside the peaks."""
        growth = self._growth
        with contextlib.suppress(RuntimeError):  # a context that is broken answers nothing
            self._noticing.others(self._real_gpu())
        return self._noticing.fill(
            Observed(
                allocated_after_groups_bytes=growth.ends if growth else (),
                growth_places=growth.places() if growth else (),
                evaluation=self._evaluation,
            )
        )

    def _real_gpu(self) -> str | None:
        """UUID of the real GPU that this trial runs on, or None."""
        reader = getattr(self, "_reader", None)
        return reader.uuid if isinstance(reader, CudaMemory) and not reader.virtual else None

    def _device(self, phases: tuple[PhaseMemory, ...], last: Reading) -> DeviceMemory:
        def most(name: str) -> int | None:
            known = [v for p in phases if (v := getattr(p, name)) is not None]
            return max(known) if known else None

        retries = [p.alloc_retries for p in phases if p.alloc_retries is not None]
        return DeviceMemory(
            rank=0,
            device=self._reader.device.index or 0,
            peak_allocated_bytes=most("peak_allocated_bytes"),
            peak_reserved_bytes=most("peak_reserved_bytes"),
            device_used_bytes=most("device_used_bytes"),
            outside_allocator_bytes=most("outside_allocator_bytes"),
            used_before_bytes=self._reader.used_before_bytes,
            alloc_retries=sum(retries) if retries else None,
            alloc_retries_last_group=self._settling.retries if self._settling else None,
            inactive_split_bytes=last.inactive_split_bytes,
            device_used_source=self._reader.device_used_source,
            phases=phases,
        )
