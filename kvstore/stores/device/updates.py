"""The update of a value on a GPU by a push: replacement, a rule in the same launch, or the user's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...arrays.grouping import Key
from ...devices.streams import DeviceStream
from ...errors import CapabilityError
from ...kernels import cuda
from ...observe.counters import SUMMING, UPDATING
from ...optimizer import Updater
from ..update import check_floating, give_up, updater_error
from . import states
from .keys import DeviceKey
from .launches import CallLaunches, KeyWork, UpdateParameters, Values, count_of

UserUpdater = Callable[[Key, Any, Any], None]


class PlainSum:
    """The sum of a key's sources: left to right, in one pass; a subclass compresses."""

    def check(self, entry: DeviceKey) -> None:
        """Raise an error if the key's values cannot be summed this way."""

    def prepare(self, works: Sequence[KeyWork], stream: DeviceStream) -> None:
        """Allocate the memory that the sum keeps with the keys; before launches are built or found."""

    def add(self, launches: CallLaunches, works: Sequence[KeyWork], into: Callable[[KeyWork], int]) -> None:
        """Append launches that write each key's sum to `into(work)` and to its outs; one for each type."""
        for dtype, group in by_type(works):
            spec = cuda.choose_spec("sum", dtype, count_of(work.srcs for work in group))
            rows = [cuda.KernelRow(w.entry.numel, srcs=w.srcs, dst=into(w), outs=w.outs) for w in group]
            launches.add(spec, rows)

    def gather_sum(self, launches: CallLaunches, works: Sequence[KeyWork]) -> Sequence[KeyWork]:
        """Append the launches that precede an update with its own sum; return works for that."""
        return works


class GpuUpdate:
    """The way in which pushed values change the values on a GPU."""

    #: Whether `run` calls the user's code, key by key.
    by_key = False
    #: The phase in counters and events.
    phase = UPDATING

    def __init__(self, total: PlainSum) -> None:
        self._sum = total

    @property
    def tag(self) -> str:
        """Return the settings that `build` depends on and the user may change at any time."""
        return ""

    def check(self, entry: DeviceKey) -> None:
        """Raise an error if the key cannot be updated this way; called before any change."""
        self._sum.check(entry)

    def build(self, launches: CallLaunches, works: Sequence[KeyWork], stream: DeviceStream) -> None:
        """Append the launches of these works."""
        raise NotImplementedError

    def run(
        self, works: Sequence[KeyWork], stream: DeviceStream, launches: Callable[[], CallLaunches]
    ) -> None:
        """Run the update; `launches` makes, or finds, the result of `build`."""
        self._sum.prepare(works, stream)
        launches().run(stream)


def by_type(works: Sequence[KeyWork]) -> list[tuple[str, list[KeyWork]]]:
    """Group works by element type."""
    groups: dict[str, list[KeyWork]] = {}
    for work in works:
        groups.setdefault(work.entry.type_name, []).append(work)
    return list(groups.items())


def emit_outs(launches: CallLaunches, works: Sequence[KeyWork]) -> None:
    """Append launches that copy the values to the outs."""
    for dtype, group in by_type([work for work in works if work.outs]):
        rows = [
            cuda.KernelRow(w.entry.numel, srcs=(w.entry.memory.address,), dst=w.outs[0], outs=w.outs[1:])
            for w in group
        ]
        launches.add(cuda.choose_spec("sum", dtype, 1), rows)


class GpuAssignUpdate(GpuUpdate):
    """The sum replaces the value."""

    phase = SUMMING

    def build(self, launches: CallLaunches, works: Sequence[KeyWork], stream: DeviceStream) -> None:
        """Sum into the value and the outs."""
        self._sum.add(launches, works, lambda work: work.entry.memory.address)


class GpuFusedUpdate(GpuUpdate):
    """An optimizer's rule in the same launch as the sum."""

    def __init__(self, total: PlainSum, updater: Updater) -> None:
        super().__init__(total)
        self._updater = updater

    def check(self, entry: DeviceKey) -> None:
        """Refuse integers, and rules without a kernel."""
        check_floating(entry, self._updater.optimizer)
        states.check_rule(self._updater.optimizer)
        super().check(entry)

    def build(self, launches: CallLaunches, works: Sequence[KeyWork], stream: DeviceStream) -> None:
        """Append one launch for each element type and kind of state."""
        optimizer, rule = self._fused_optimizer, self.tag
        place = {work.entry.key: number for number, work in enumerate(works)}
        for dtype, group in by_type(self._sum.gather_sum(launches, works)):
            master = optimizer.keeps_master(group[0].entry.like)
            spec = cuda.choose_spec("update", dtype, count_of(work.srcs for work in group), rule, master)
            parameters = UpdateParameters(group[0].entry.place, spec, len(group), stream)
            launches.parameters.append((parameters, [place[work.entry.key] for work in group]))
            lines = parameters.row_addresses(len(group))
            launches.add(
                spec, [self._update_row(work, line) for work, line in zip(group, lines, strict=True)]
            )

    def _update_row(self, work: KeyWork, line: int) -> cuda.KernelRow:
        entry = work.entry
        master, state_arrays = states.split_state(self._updater.optimizer, entry)
        return cuda.KernelRow(
            entry.numel,
            srcs=work.srcs,
            dst=entry.memory.address,
            outs=work.outs,
            states=state_arrays,
            master=master,
            params=line,
        )

    def run(
        self, works: Sequence[KeyWork], stream: DeviceStream, launches: Callable[[], CallLaunches]
    ) -> None:
        """Count, and launch; if that fails, no update is counted."""
        updater, optimizer = self._updater, self._fused_optimizer
        counts = updater.snapshot_counts()
        try:
            for work in works:
                states.ensure_state(updater, work.entry, stream)
            self._sum.prepare(works, stream)
            values: Values = [optimizer.advance(work.entry.key, work.entry.like) for work in works]
            launches().run(stream, values)
        except BaseException as error:
            give_up(updater, counts, error)

    @property
    def tag(self) -> str:
        """The rule, as the optimizer is set now."""
        return str(self._fused_optimizer.rule())

    @property
    def _fused_optimizer(self) -> Any:
        return self._updater.optimizer


class GpuCallbackUpdate(GpuUpdate):
    """Any callable ``updater(key, merged, stored)``; if it raises, the value is as before."""

    by_key = True

    def __init__(self, total: PlainSum, updater: UserUpdater) -> None:
        super().__init__(total)
        self._updater = updater

    def check(self, entry: DeviceKey) -> None:
        """Let the callable decide; optimizers that are not compiled need host arrays."""
        if isinstance(self._updater, Updater):
            check_floating(entry, self._updater.optimizer)
            states.check_rule(self._updater.optimizer)
            raise CapabilityError("this optimizer runs on host arrays only")
        super().check(entry)

    def build(self, launches: CallLaunches, works: Sequence[KeyWork], stream: DeviceStream) -> None:
        """Sum into other memory than the value."""
        bare = [work._replace(outs=()) for work in works]
        self._sum.add(
            launches, bare, lambda work: work.entry.spare_memory("merged", work.entry.dtype).address
        )

    def run(
        self, works: Sequence[KeyWork], stream: DeviceStream, launches: Callable[[], CallLaunches]
    ) -> None:
        """Sum and call; then write the outs."""
        super().run(works, stream, launches)
        for work in works:
            self._call_updater(work.entry, stream)
        filled = CallLaunches(works[0].entry.place, [work.entry for work in works])
        emit_outs(filled, works)
        filled.run(stream)

    def _call_updater(self, entry: DeviceKey, stream: DeviceStream) -> None:
        before = entry.spare_memory("before", entry.dtype)
        copy = entry.place.driver.copy
        size, device = entry.nbytes, entry.device
        if size:
            copy(before.address, entry.memory.address, size, stream.handle, device)
        try:
            self._updater(
                entry.key,
                entry.memory_array(entry.spare_memory("merged", entry.dtype), entry.dtype),
                entry.value_array(),
            )
        except BaseException as error:
            if size:
                copy(entry.memory.address, before.address, size, stream.handle, device)
            if not isinstance(error, Exception):  # Ctrl-C is not an error of the updater
                raise
            raise updater_error(error, entry.key) from error


def apply_with(total: PlainSum, updater: UserUpdater | None) -> GpuUpdate:
    """Choose: no updater, a rule with a kernel, or any callable."""
    if updater is None:
        return GpuAssignUpdate(total)
    if isinstance(updater, Updater) and updater.optimizer.fused:
        return GpuFusedUpdate(total, updater)
    return GpuCallbackUpdate(total, updater)
