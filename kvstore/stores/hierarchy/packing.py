"""The packed sums of a host: one codec for all its workers, and residuals that outlive each of them.

The host's memory holds two residuals of each slice, by parity of the round: that of a round is computed from
that of the round before, which stays. So a worker that replaces a dead carrier packs the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.grouping import Key
from ...compression import Codec, Feedback, create
from ...errors import CapabilityError, ConfigError
from ...kernels import cpu
from ..entry import Array
from ..shared.native import _shared as shm

Handle = shm.Handle

_FLAT = "create the store with hierarchy='flat' on all workers"


class HostFeedback(Feedback):
    """A worker's part of a codec with residuals that belong to its host."""

    def save(self, path: str) -> None:
        """Raise: the residuals belong to no worker."""
        raise CapabilityError(f"residuals of hosts are not saved; {_FLAT}")

    def load(self, path: str, keys: Mapping[Key, Array]) -> None:
        """Raise: the residuals belong to no worker."""
        raise CapabilityError(f"residuals of hosts are not loaded; {_FLAT}")


class HostPacking:
    """The codec of a host, which one of its workers sets and the others find set."""

    def __init__(self, job: shm.Job) -> None:
        self._job = job
        #: How often this worker has set a codec; a restarted worker continues the count of its host.
        self._set = 0
        self._version = 0
        self._codec: Codec | None = None
        if job.returned():
            with shm.RegionLock(job):
                self._set = max(0, self._read_codec()["set"] - 1)

    def set(self, codec: Codec) -> None:
        """Pack from the next round of each key on; ConfigError: another worker has set another codec."""
        if codec.compiled is None:
            raise CapabilityError(f"hosts do not pack with {codec.name!r}, which has no kernels; {_FLAT}")
        wanted = {"set": self._set + 1, "codec": {"type": codec.name, **codec.config()}}
        with shm.RegionLock(self._job):
            there = self._read_codec()
            if there["set"] < wanted["set"]:
                shm.set_settings(self._job, json.dumps(wanted).encode())
            elif there["set"] == wanted["set"] and there != wanted:  # else the other worker has set two since
                raise ConfigError(
                    f"another worker of this host has set the codec {there['codec']}, this worker "
                    f"{wanted['codec']}: all workers of a host must set the same"
                )
        self._set += 1

    def _read_codec(self) -> dict[str, Any]:
        text = shm.settings(self._job)
        return json.loads(text) if text else {"set": 0, "codec": None}

    def codec(self) -> Codec | None:
        """Return the codec that the workers of the host have set."""
        version = shm.settings_version(self._job)
        if version != self._version:
            with shm.RegionLock(self._job):
                version, found = shm.settings_version(self._job), self._read_codec()
            self._codec = create(found["codec"]) if found["codec"] else None
            self._version = version  # last: two threads call this
        return self._codec

    def pack(self, handle: Handle, round: int, total: Array, codec: Codec) -> Array:
        """Pack the sum of a round that this worker has opened, or of the next one."""
        assert codec.compiled is not None
        residual = None
        if codec.feedback:
            before, residual = self._round_residuals(handle, codec, round)
            np.copyto(residual, before)
        words = np.empty(cpu.encoded_bytes(codec.compiled[0], total.size), np.uint8)
        cpu.encode(*codec.compiled, [total], residual, words)
        return words

    def move_residuals(self, before: Sequence[Handle], now: Sequence[Handle]) -> None:
        """Move the residuals of a key to other slices. No worker of the host may push the key during this."""
        records = [_residual_record(handle) for handle in before]
        if None in records:
            return
        newest = [
            _residual_arrays(handle, one)[handle.complete % 2]
            for handle, one in zip(before, records, strict=True)
        ]
        whole, at = np.concatenate(newest), 0
        for handle in now:
            begun = _new_residuals(handle, records[0]["codec"])[handle.complete % 2]
            begun[...] = whole[at : at + begun.size]
            at += begun.size

    def _round_residuals(self, handle: Handle, codec: Codec, round: int) -> tuple[Array, Array]:
        """Return the residuals of the round before and of this round; zeros if the codec has changed."""
        record = _residual_record(handle)
        there = (
            _new_residuals(handle, codec.name)
            if record is None or record["codec"] != codec.name
            else _residual_arrays(handle, record)
        )
        return there[(round - 1) % 2], there[round % 2]


def _residual_record(handle: Handle) -> Any:
    """Return the codec and the offsets of a slice's residuals; None: it has none."""
    _, text = handle.record()
    return json.loads(text) if text else None


def _residual_arrays(handle: Handle, record: Any) -> list[Array]:
    """Return both residuals of a slice."""
    return [handle.region_array(at, handle.shape, np.dtype(np.float32)) for at in record["at"]]


def _new_residuals(handle: Handle, codec: str) -> list[Array]:
    """Return new residuals of a slice, all 0."""
    made = [handle.new_state(handle.shape, np.dtype(np.float32), at) for at in range(2)]
    for _, array in made:
        array[...] = 0
    handle.set_record(json.dumps({"codec": codec, "at": [offset for offset, _ in made]}).encode())
    return [array for _, array in made]
