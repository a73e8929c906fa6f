"""kvstore: the `device` store, by plans and by plain calls; codec kernels by themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import kvstore as kv
from bench.peers.base import Unsupported
from bench.peers.device.base import LEARNING_RATE, MOMENTUM, THRESHOLD, Data, Peer, Way


class Ours(Peer):
    """One store for each set of tensors, so that the stored values alternate, too."""

    name = "kvstore"

    def __init__(self) -> None:
        self._stores: list[Any] = []
        self._kernels: list[Any] = []

    def ways(self, data: Data) -> dict[str, Way]:
        if data.case.op in ("quantise", "dequantise"):
            return {"kernel": self._kernel(data)}
        keys = list(range(len(data.case.sizes)))
        self._stores = [self._store(data, number) for number in range(data.sets)]
        plans = [
            store.bind(keys, values, out=[[] for _ in keys])
            for store, values in zip(self._stores, data.values, strict=True)
        ]
        pushes = [
            partial(store.push, keys if len(keys) > 1 else 0, values if len(keys) > 1 else values[0])
            for store, values in zip(self._stores, data.values, strict=True)
        ]
        return {"plan": partial(_call, plans), "push": partial(_call, pushes)}

    def _store(self, data: Data, number: int) -> Any:
        store = kv.create("device")
        store.init(list(range(len(data.case.sizes))), [values[0] for values in data.values[number]])
        if data.case.op == "update":
            store.set_optimizer(kv.optimizer.SGD(learning_rate=LEARNING_RATE, momentum=MOMENTUM))
        if data.case.op == "compress":
            store.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
        return store

    def results(self, data: Data) -> list[Any] | None:
        if not self._stores:
            return None
        self._stores[0].pull(list(range(len(data.case.sizes))), out=data.outs[0])
        return data.outs[0]

    def refresh(self, data: Data) -> Callable[[], None]:
        """Read all addresses of a plan again."""
        keys = list(range(len(data.case.sizes)))
        plan = self._stores[0].bind(keys, data.values[0], out=[[] for _ in keys])
        refreshed: Callable[[], None] = plan.refresh
        return refreshed

    def _kernel(self, data: Data) -> Way:
        """Launch a codec's kernel alone, which stores only launch as a part of an operation."""
        if data.device != "cuda":
            raise Unsupported("kernels need a GPU")
        from kvstore.devices import arrays, driver
        from kvstore.devices.gpu_context import GpuContext
        from kvstore.kernels import cuda
        from kvstore.stores.device.launches import CallLaunches

        case, torch = data.case, data.torch
        place = GpuContext(driver.get_driver(), torch.cuda.current_device())
        (size,) = case.sizes
        words_like = {"dtype": torch.int32, "device": "cuda"}
        words = [
            [torch.randint(-(2**31), 2**31, (-(-size // 16),), **words_like) for _ in range(case.k)]
            for _ in range(data.sets)
        ]
        residuals = [torch.zeros(size, device="cuda") for _ in range(data.sets)]
        self._kernels = [place, words, residuals]
        launches = []
        for number in range(data.sets):
            codes = tuple(word.data_ptr() for word in words[number])
            value, out = data.values[number][0][0].data_ptr(), data.outs[number][0].data_ptr()
            if case.op == "quantise":
                row = cuda.KernelRow(
                    size, srcs=(value,), residuals=(residuals[number].data_ptr(),), words=codes
                )
            else:
                row = cuda.KernelRow(size, dst=out, words=codes)
            launch = CallLaunches(place)
            launch.add(cuda.choose_spec(f"{case.op}_2bit", k=case.k), [row], (np.float32(THRESHOLD),))
            launches.append(launch)
        self._kernels.append(launches)
        return lambda i: launches[i].run(arrays.stream_for(data.values[0][0], place.device))

    def release(self) -> None:
        for store in self._stores:
            store.close()
        if self._kernels:
            place, *_ = self._kernels
            self._kernels = []
            place.close()
        self._stores = []


def _call(calls: list[Callable[[], Any]], number: int) -> None:
    calls[number]()
