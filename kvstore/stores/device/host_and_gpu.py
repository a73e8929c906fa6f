"""Stores with keys on the host or on GPUs, by the place of their first values and of later pushes."""

from __future__ import annotations

from typing import Any

from ...arrays.grouping import Group, Key, key_kind_error
from ...arrays.sparse import RowSparseArray
from ...devices import arrays
from ...devices.arrays import DeviceArray, DeviceView
from ...errors import CapabilityError, DuplicateKeyError
from ..entry import Array, StoredKey, dense_of, initialised_already
from ..local.backend import LocalBackend
from .arguments import CallerStreams, copy_to, send_value, view_out
from .keys import DeviceKey

#: Arrays on GPUs that receive values of the host's keys.
Sent = list[tuple[Key, list[DeviceView]]]


class HostAndGpuBackend(LocalBackend):
    """The part of a store that does not depend on how GPUs sum.

    Subclasses say which copy of a key is read.
    """

    #: The executor for GPUs.
    _gpus: Any
    #: All keys, in the order of their init.
    _order: dict[Key, None]
    #: The keys on GPUs.
    _on_gpu: dict[Key, Any]

    def _gpu_copy(self, key: Key) -> DeviceKey:
        """Return the copy of a key on GPUs that reads use."""
        raise NotImplementedError

    def names(self) -> dict[int, str]:
        """Return the keys by the number of their entry, on all devices."""
        gpus = {self._gpu_copy(key).slice.number: str(key) for key in self._on_gpu}
        return super().names() | gpus

    def discard(self, keys: list[Key]) -> None:
        """Undo the init of keys."""
        super().discard(keys)
        for key in keys:
            self._order.pop(key, None)
            self._on_gpu.pop(key, None)

    def close(self) -> None:
        """Free the memory."""
        self._on_gpu.clear()
        self._order.clear()
        super().close()

    # ------------------------------------------------------------------------------------ inspection

    def keys(self) -> list[Key]:
        """Return all keys in the order of their init."""
        return list(self._order)

    def view(self, key: Key) -> Any:
        """Return live memory, read-only."""
        return self._gpu_copy(key).value_array(readonly=True) if key in self._on_gpu else super().view(key)

    def fetch(self, key: Key) -> Any:
        """Return the value on the host, for a file."""
        return self._gpu_copy(key).to_host() if key in self._on_gpu else super().view(key)

    def empty(self, key: Key) -> Any:
        """Return an array on the key's device, or on its first GPU."""
        if key not in self._on_gpu:
            return super().empty(key)
        like = self._gpu_copy(key)
        return like.memory_array(like.new_memory(like.dtype), like.dtype)

    def copy_into(self, home: Any, array: Any, key: Key) -> None:
        """Copy an array, from anywhere, to one that `empty` made."""
        if not isinstance(home, DeviceArray):
            super().copy_into(home, array, key)
            return
        streams = CallerStreams([array])
        target = arrays.view_array(home, "array", streams.stream_of(home.device))
        copy_to(target, self._gpu_copy(key), array, streams)

    def key_templates(self) -> dict[Key, Array]:
        """Return for each key an array of its shape and type that needs no memory."""
        host = super().key_templates()
        return {key: self._gpu_copy(key).like if key in self._on_gpu else host[key] for key in self._order}

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Return the devices of each key, with its bytes there."""
        host = super().placement()
        return {key: self._gpu_places(key) if key in self._on_gpu else host[key] for key in self._order}

    def _gpu_places(self, key: Key) -> list[tuple[str, int]]:
        """Return the devices of a key on GPUs."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------ between the places

    def _comes_from_gpu(self, key: Key, values: list[Any]) -> bool:
        """Return whether the values of one push are on GPUs; all of them are, or none."""
        if not arrays.any_on_device(values):
            return False
        arrays.check_all_on_devices(values, key)
        return True

    def _dense_outs(self, key: Key, outs: list[Any], ignore_sparse: bool) -> list[Any]:
        sparse = [out for out in outs if isinstance(out, RowSparseArray)]
        if sparse and key in self._on_gpu:
            self._sparse_outs(self._gpu_copy(key), sparse, ignore_sparse)  # type: ignore[arg-type]
        return [out for out in outs if not isinstance(out, RowSparseArray)]

    def _from_host(self, groups: list[Group], streams: CallerStreams) -> tuple[list[Group], Sent]:
        """Check the outs of the host's keys; return those on the host, and those on GPUs."""
        host: list[Group] = []
        sent: Sent = []
        for key, outs in groups:
            if key in self._on_gpu:
                continue
            entry: Any = self._key_entry(key)
            far = [out for out in outs if arrays.device_of(out) is not None]
            host.append((key, [out for out in outs if arrays.device_of(out) is None]))
            if far:
                sent.append((key, [view_out(entry, out, streams) for out in far]))  # type: ignore[misc]
        self._check_outs(host)
        return [(key, outs) for key, outs in host if outs], sent

    def _send_values(self, sent: Sent, streams: CallerStreams) -> None:
        for key, outs in sent:
            for out in outs:
                send_value(dense_of(self._key_entry(key)), out, self._gpus.gpu_context(out.device), streams)

    # ---------------------------------------------------------------------------------------- checks

    def _check_new(self, key: Key, values: list[Any]) -> None:
        self._check_kind(key)
        if key in self._order:
            raise initialised_already(key)
        if len(values) > 1:
            raise DuplicateKeyError(f"key {key!r} occurs {len(values)} times in one init; give it one value")

    def _check_kind(self, key: Key) -> None:
        some = next(iter(self._order), key)
        if isinstance(some, str) != isinstance(key, str):
            raise key_kind_error(key, type(some))

    def _key_entry(self, key: Key) -> StoredKey:
        if key in self._on_gpu:
            raise CapabilityError(
                f"key {key!r} is on cuda:{self._gpu_copy(key).device}, which cannot do that"
            )
        return super()._key_entry(key)
