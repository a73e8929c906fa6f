"""The update of a weight in a round of the shared store, and the optimizer that all workers share.

The optimizer is one description in the region; each process builds its own object from it, and the opener of
a round plans with that object. States are in the region too. Before a worker changes settings, it completes
the rounds that it has pushed into; after the change, no round opens without it. Changes of several workers
are applied to the description one after the other, each to the optimizer that its worker knows.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...arrays import pages
from ...arrays.grouping import Key
from ...errors import ConfigError, UpdaterError
from ...observe.counters import SUMMING, UPDATING
from ...optimizer import Optimizer, Updater
from ...optimizer.builtin import arrays_of, map_state
from ...optimizer.descriptions import changed_text, changes_of, describe_conflict, text_of
from ...optimizer.optimizer import Array, State
from ...optimizer.update_clock import time_at
from ..update import check_floating
from .gpu_access import GpuAccess
from .native import _shared as shm
from .region_table import RegionTables, outline_state, record_of, state_of_outline

if TYPE_CHECKING:
    from ...optimizer.states import StatesContent
    from .reading import ValueReader
    from .rows import SparseKeys

Handle = shm.Handle

_MISSING: Any = object()
#: The version of no description.
_NO_VERSION = -1


class _RegionSettings(NamedTuple):
    """The description of the optimizer in the region; callers hold `RegionLock`."""

    now: str = ""
    #: The description before any change, and the worker that has installed it.
    installed: str = ""
    rank: int = 0
    #: How often the update counts were set, see `UpdateClock`; and the position in the program where a
    #: checkpoint has set them.
    epoch: int = 0
    place: int = -1

    @classmethod
    def read_from(cls, job: shm.Job) -> _RegionSettings:
        """Read the description; it is empty without an optimizer."""
        text = shm.settings(job).decode()
        return cls(*json.loads(text)) if text else cls()

    def write_to(self, job: shm.Job) -> None:
        """Write the description."""
        shm.set_settings(job, json.dumps(self).encode())


class JobUpdater:
    """The updater of a job, in one process."""

    #: Whether a round that was carried out is complete, or has failed.
    completes = True

    def __init__(self, job: shm.Job, keys: shm.Keys, gpus: GpuAccess, rank: int) -> None:
        self._job, self._keys, self._gpus, self._rank = job, keys, gpus, rank
        self.updater: Updater | None = None
        self.tables = RegionTables(job)
        self._call: Callable[..., None] | None = None
        self._set = 0  # how often this process has set an updater
        self._mode = 0  # of the job, as this process knows it
        self._version = self._epoch = 0  # of the description in the region, as this process knows it
        #: Errors of this process, by key and round, until they are reported to the caller.
        self.causes: dict[tuple[Key, int], BaseException] = {}
        self._at_work: tuple[int, Key] | None = None
        self._records: dict[Key, int] = {}  # the descriptions of states in the region that `updater` uses

    @property
    def at_work(self) -> Key | None:
        """The key of the round that this thread is carrying out: a wait for it would never end."""
        now = self._at_work
        return now[1] if now is not None and now[0] == threading.get_ident() else None

    def check(self, handle: Handle) -> None:
        """Raise DTypeError if the key's weight cannot be updated."""
        if self.updater is not None and not handle.is_side:
            check_floating(handle, self.updater.optimizer)

    # --------------------------------------------------------------------------------------- settings

    def set_updater(self, updater: Any) -> None:
        """Use an updater, or None for plain sums."""
        if isinstance(updater, Updater):
            self.set_optimizer(updater.optimizer)
            return
        self._set += 1
        mode = 2 * self._set + (updater is not None)
        with shm.RegionLock(self._job):
            if shm.mode(self._job) < mode:
                shm.set_settings(self._job, b"")
                shm.set_mode(self._job, mode)
        self.updater, self._call = None, updater
        shm.begin_counts(self._job, 0, 0, 0)
        self._note_mode(mode)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Install an optimizer, or find an equal one installed."""
        text = _described_rule(optimizer)
        mode = 2 * (self._set + 1) + 1
        with shm.RegionLock(self._job):
            there = _RegionSettings.read_from(self._job)
            if shm.mode(self._job) < mode:
                self._set_counts({}, optimizer.begin_num_update)
                there = _RegionSettings(text, text, self._rank, there.epoch + 1)
                there.write_to(self._job)
                shm.set_mode(self._job, mode)
            elif shm.mode(self._job) == mode and there.installed != text:
                raise ConfigError(describe_conflict(there.installed, there.rank, text, self._rank))
            elif shm.mode(self._job) == mode:
                text = there.now  # another worker may have changed the settings already
            version = shm.settings_version(self._job)
        self._set += 1
        self._set_optimizer(_build_rule(text) or optimizer, version, there.epoch)
        begin = optimizer.begin_num_update
        shm.begin_counts(self._job, there.epoch, begin, begin)
        self._note_mode(mode)

    def _set_counts(self, counts: Mapping[Key, int], num_update: int) -> None:
        for handle in self._keys.all():
            handle.updates = counts.get(handle.key, 0)
        shm.set_num_update(self._job, num_update)

    def _note_mode(self, mode: int, able: bool = True) -> None:
        if able:
            self._mode = mode
        shm.note_mode(self._job, mode, able)

    def _set_optimizer(self, optimizer: Optimizer, version: int, epoch: int) -> None:
        self.updater, self._call = Updater(optimizer), None
        self._version, self._epoch = version, epoch
        self._records.clear()

    def build_from_mode(self) -> None:
        """Build the optimizer that another worker has set; if that fails, other workers open the rounds."""
        with shm.RegionLock(self._job):
            mode, there = shm.mode(self._job), _RegionSettings.read_from(self._job)
            version = shm.settings_version(self._job)
        optimizer = _build_rule(there.now) if mode & 1 else None
        if optimizer is not None:
            self._set_optimizer(optimizer, version, there.epoch)
        self._note_mode(mode, optimizer is not None)

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings of the optimizer that this worker knows, for all workers.

        If another worker has set a new one, its settings do not change.
        """
        self._apply_changes()
        assert self.updater is not None
        optimizer = self.updater.optimizer
        if shm.mode(self._job) == self._mode:
            self._load_counts()
        optimizer.configure(**changes)
        described = changes_of(optimizer, changes)
        self._amend_description(lambda there: there._replace(now=changed_text(there.now, described)))

    def load_settings(self) -> None:
        """Use the settings and update counts that another worker has loaded from a checkpoint."""
        self._apply_changes()
        if self.updater is not None and shm.mode(self._job) == self._mode:
            self._load_counts()
            self._begin_counts()

    def _begin_counts(self) -> None:
        assert self.updater is not None
        begin = self.updater.optimizer.begin_num_update
        shm.begin_counts(self._job, self._epoch, begin, max(begin, shm.num_update(self._job)))

    def _amend_description(self, change: Callable[[_RegionSettings], _RegionSettings]) -> None:
        """Change the description in the region, if it is of the optimizer that this worker knows."""
        with shm.RegionLock(self._job):
            if shm.mode(self._job) != self._mode:
                return
            there = _RegionSettings.read_from(self._job)
            now = change(there)
            if now != there:
                now.write_to(self._job)
        self._version = _NO_VERSION  # another worker may have made changes first
        self._apply_changes()

    def _apply_changes(self) -> None:
        """Apply the changes of other workers to the optimizer that this worker knows."""
        if self.updater is None or shm.settings_version(self._job) == self._version:
            return
        with shm.RegionLock(self._job):
            if shm.mode(self._job) != self._mode:
                return
            there, self._version = _RegionSettings.read_from(self._job), shm.settings_version(self._job)
        self._epoch = there.epoch
        optimizer = _build_rule(there.now)
        if optimizer is not None:
            self.updater.optimizer = optimizer
        else:
            self.updater.optimizer.configure(**json.loads(there.now).get("changes", {}))

    # ------------------------------------------------------------------------------------------ rounds

    def carry_out(self, handle: Handle, rows: SparseKeys) -> None:
        """Plan, or do, the update of the round that this worker has opened, unless another thread does."""
        outer = self._at_work
        try:
            if handle.begin_plan():
                self._at_work = (threading.get_ident(), handle.key)
                if handle.has_failed(handle.complete + 1):  # Ctrl-C interrupted the end of a failed round
                    shm.close_opened(handle, False)
                else:
                    self._carry_out(handle, rows)
        except BaseException as error:
            self._records.pop(handle.key, None)  # the state in the region counts
            if isinstance(error, Exception) or self._call is not None:
                kind = type(error).__name__
                text = (
                    f"{self._rule_name()} raised {kind} on key {handle.key!r} (worker {self._rank}): {error}"
                )
                self._fail_round(handle, error, text)
            if not isinstance(error, Exception):  # Ctrl-C: no rule has failed; the round is carried out later
                raise
        finally:
            self._at_work = outer
            self._job.leave_phase()

    def _carry_out(self, handle: Handle, rows: SparseKeys) -> None:
        self._enter_update(handle)
        on_gpu, ranks = shm.opened_on_gpu(handle)
        if on_gpu:
            self._gpus.staging_in_use().ipc.carry_out(handle, on_gpu, ranks)
        elif shm.opened_with_rows(handle):
            rows.carry_out(handle)
        elif self.updater is not None and self.updater.optimizer.fused and not shm.opened_privately(handle):
            self._plan_update(handle)  # all parts outlive their workers: an update that has begun must end
        else:
            self._run_update(handle)

    def _fail_round(self, handle: Handle, error: BaseException, text: str) -> None:
        """Fail the opened round; if another worker has it, this worker gets an error anyway."""
        if handle.is_opened:
            self.causes[handle.key, handle.complete + 1] = error
            handle.undo()
            handle.fail_round(handle.complete + 1, text)
            shm.close_opened(handle, False)

    def _enter_update(self, handle: Handle) -> None:
        phase = UPDATING if shm.mode(self._job) & 1 else SUMMING
        self._job.enter(phase, handle, handle.complete + 1, handle.nbytes)

    def _rule_name(self) -> str:
        return "the updater" if self.updater is None else type(self.updater.optimizer).__name__

    def _plan_update(self, handle: Handle) -> None:
        assert self.updater is not None
        count, weight = self.begin_update(handle), handle.value()
        self.bring_state(handle, weight)
        rule, params, master, states = self.updater.plan(handle.key, weight)
        self.note_state(handle)
        shm.publish_work(handle, rule, params, master, list(states), count())

    def _run_update(self, handle: Handle) -> None:
        merged, weight = pages.empty(handle.shape, handle.dtype), handle.value(other=True)
        shm.sum_opened(handle, merged)
        if handle.has_failed(handle.complete + 1):
            raise UpdaterError("the memory of a worker could not be read")
        self._enter_update(handle)
        np.copyto(weight, handle.value())
        if self.updater is None:
            assert self._call is not None
            self._call(handle.key, merged, weight)
            shm.close_opened(handle, True)
            return
        count = self.begin_update(handle)
        self.bring_state(handle, weight)
        handle.note_undo([(array, None) for array in self.state_arrays(handle)])
        self.updater(handle.key, merged, weight)
        self.note_state(handle)
        shm.close_opened(handle, True, count())

    def apply_sum(self, handle: Handle, merged: Any, weight: Array) -> None:
        """Call the updater on a given sum and weight."""
        (self.updater or self._call)(handle.key, merged, weight)  # type: ignore[misc]

    def begin_update(self, handle: Handle) -> Callable[[], int]:
        """Set the optimizer's counts to those of the job; return a function for the key's new count."""
        self._apply_changes()
        assert self.updater is not None
        optimizer = self.updater.optimizer
        counts = optimizer._index_update_count
        counts.pop(handle.key, None)
        if handle.updates:
            counts[handle.key] = handle.updates
        time = time_at([shm.stamp_of_opened(handle)], self._epoch)
        optimizer.num_update = max(optimizer.begin_num_update, time)

        def new() -> int:
            shm.raise_num_update(self._job, optimizer.num_update)
            return counts.get(handle.key, 0)

        return new

    # ------------------------------------------------------------------------------------------ states

    def bring_state(self, handle: Handle, weight: Array) -> None:
        """Use the state of a key in the region, and create it if there is none."""
        assert self.updater is not None
        if self._records.get(handle.key) == handle.record_at:
            return
        offset, record = handle.record_at, record_of(handle, shm.mode(self._job))
        if record is not None:
            self.updater.states[handle.key] = state_of_outline(handle, record["state"])
            self._records[handle.key] = offset
            return
        optimizer = self.updater.optimizer
        self._put_state(handle, optimizer.create_state_multi_precision(handle.key, weight))
        if offset:  # of an earlier optimizer
            handle.updates = 0
            optimizer._index_update_count.pop(handle.key, None)

    def _put_state(self, handle: Handle, state: State) -> None:
        assert self.updater is not None
        offset, there = self._write_state(handle, state, [])
        handle.put_record(offset)
        self.updater.states[handle.key] = there
        self._records[handle.key] = offset

    def _write_state(self, handle: Handle, state: State, taken: list[Array]) -> tuple[int, State]:
        """Copy a state into the region; return the offset of its description, and the state there.

        The arrays are added to `taken`.
        """

        def moved(array: Array) -> Array:
            there = handle.new_state(array.shape, array.dtype, len(taken))[1]
            taken.append(there)
            np.copyto(there, array)
            return there

        there = map_state(state, moved)
        text = json.dumps({"mode": self._mode, "state": outline_state(self._job, there)})
        return handle.new_record(text.encode()), there

    def state_arrays(self, handle: Handle) -> list[Array]:
        """Return the arrays of the updater's state of a key that have rows."""
        assert self.updater is not None
        return [a for a in arrays_of(self.updater.states.get(handle.key)) if a.ndim and a.size]

    def note_state(self, handle: Handle) -> None:
        """Copy arrays into the region that have replaced parts of the state in an update."""
        assert self.updater is not None
        state = self.updater.states.get(handle.key)
        if any(not self._job.offset_of(array) for array in arrays_of(state) if array.size):
            self._put_state(handle, state)

    def _load_counts(self) -> None:
        assert self.updater is not None
        optimizer = self.updater.optimizer
        optimizer._index_update_count = {h.key: h.updates for h in self._keys.all() if h.updates}
        optimizer.num_update = max(optimizer.begin_num_update, shm.num_update(self._job))

    def gather_updater(self, reader: ValueReader) -> Updater:
        """Return an updater with states and counts of all keys, each from one round."""
        self._apply_changes()
        assert self.updater is not None
        made, counts = Updater(self.updater.optimizer), {}
        for handle in self._keys.all():
            state, count = reader.read(handle, partial(self._read_state, handle))
            if state is not _MISSING:
                made.states[handle.key] = state
            if count:
                counts[handle.key] = count
        made.optimizer._index_update_count = counts
        made.optimizer.num_update = max(made.optimizer.begin_num_update, shm.num_update(self._job))
        return made

    def _read_state(self, handle: Handle) -> tuple[Any, int]:
        """Return the state in the region, live if it is stable, or `_MISSING`; and the count of updates."""
        if handle.sparse:
            table = self.tables.table_of(handle)
            with table.lock:
                is_there, state = table.read_numbers().whole_tree(shm.mode(self._job))
            return state if is_there else _MISSING, handle.updates
        record = record_of(handle, shm.mode(self._job))
        if record is None:
            return _MISSING, handle.updates
        state = state_of_outline(handle, record["state"])
        return state if handle.is_stable else map_state(state, np.copy), handle.updates

    def replace_states(self, content: StatesContent) -> None:
        """Replace states, counts and settings of the job by those of a file; after an error all is as before.

        A key without a state in the file has none afterwards. States of an optimizer that another worker has
        replaced have no effect.
        """
        self._apply_changes()
        assert self.updater is not None
        loaded, handles = Updater(self.updater.optimizer), self._keys.all()
        loaded.adopt(content, {handle.key: handle.like for handle in handles})
        records, optimizer = self._write_states(handles, loaded.states), loaded.optimizer
        self._set_optimizer(optimizer, self._version, self._epoch)
        with shm.RegionLock(self._job):
            if shm.mode(self._job) != self._mode:  # another worker has replaced the optimizer
                return
            for handle in handles:
                handle.put_record(records.get(handle.key, 0))
            self._set_counts(optimizer._index_update_count, optimizer.num_update)
        place = sum(handle.arrived for handle in handles) + self._job.barriers
        text = "" if content.optimizer is None else _described_rule(optimizer)

        def noted(there: _RegionSettings) -> _RegionSettings:
            epoch = there.epoch if there.place == place else there.epoch + 1
            return there._replace(now=text or there.now, epoch=epoch, place=place)

        self._amend_description(noted)
        self._begin_counts()

    def _write_states(self, handles: list[Handle], states: dict[Key, State]) -> dict[Key, int]:
        """Write the states of keys and their descriptions to the region.

        Return the offsets of the descriptions.
        """
        taken: dict[Handle, list[Array]] = {handle: [] for handle in handles if handle.key in states}
        try:
            return {h.key: self._write_state(h, states[h.key], arrays)[0] for h, arrays in taken.items()}
        except BaseException:
            for handle, arrays in taken.items():
                for array in arrays:
                    handle.free_memory(self._job.offset_of(array), array.nbytes)
            raise

    def update_master(self, handle: Handle, weight: Array) -> None:
        """Update the float32 copy of a 16-bit weight after a change outside of rounds."""
        if self.updater is None or handle.dtype.itemsize != 2:
            return
        if record_of(handle, shm.mode(self._job)) is not None:
            self.bring_state(handle, weight)
            self.updater.follow(handle.key, weight)


def _described_rule(optimizer: Optimizer) -> str:
    try:
        return text_of(optimizer)
    except ConfigError:  # a rule or schedule that is not registered: every worker must set its own
        return json.dumps({"name": type(optimizer).__qualname__, "config": None})


def _build_rule(text: str) -> Optimizer | None:
    if not text:  # plain sums, or a callable
        return None
    made = json.loads(text)
    if made["config"] is None:
        return None
    try:
        return Optimizer.from_config(made["name"], made["config"])
    except ConfigError:
        return None
