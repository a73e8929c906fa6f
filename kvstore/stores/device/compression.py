"""Compressed pushes on a GPU: quantised, decoded and summed in one launch, with residuals on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ...arrays.grouping import Key
from ...compression import Codec, Feedback
from ...devices.memory import DeviceMemory
from ...devices.streams import DeviceStream
from ...errors import CapabilityError
from ...kernels import cuda
from .keys import Array, DeviceKey
from .launches import CallLaunches, KeyWork, count_of
from .updates import PlainSum

_FLOAT32 = np.dtype(np.float32)
_HALVES = {"fp16": "float16", "bf16": "bfloat16"}
_ON_GPU = (*cuda.CODECS, *_HALVES)


class DeviceFeedback(Feedback):
    """A codec with residuals on the devices of their keys: the host, or a GPU.

    Residuals on a GPU are copied to the host to be saved, and back when the key is pushed after a load.
    """

    def __init__(self, codec: Codec, on_gpu: Callable[[], Iterable[DeviceKey]]) -> None:
        super().__init__(codec)
        self._on_gpu = on_gpu

    def save(self, path: str) -> None:
        """Write all residuals, from all devices."""
        mine = {
            (entry.key, source): entry.download_array(memory, _FLOAT32)
            for entry in self._on_gpu()
            for source, memory in entry.residuals.items()
        }
        self._residuals.update(mine)
        try:
            super().save(path)
        finally:
            for name in mine:
                del self._residuals[name]

    def load(self, path: str, keys: Mapping[Key, Array]) -> None:
        """Read residuals; those of keys on a GPU are copied there at the next push."""
        super().load(path, keys)
        for entry in self._on_gpu():
            entry.residuals.clear()

    def remove_residual(self, key: Key, source: int) -> Array | None:
        """Remove a residual and return it, for the GPU."""
        return self._residuals.pop((key, source), None)

    @property
    def nbytes(self) -> int:
        """Memory of the residuals, in bytes."""
        return super().nbytes + sum(m.nbytes for entry in self._on_gpu() for m in entry.residuals.values())


class CompressedSum(PlainSum):
    """A sum of decoded values."""

    def __init__(self, feedback: DeviceFeedback) -> None:
        self._feedback = feedback
        self._codec = feedback.codec

    def check(self, entry: DeviceKey) -> None:
        """Refuse other types than float32, and codecs without a kernel."""
        self._feedback.check(entry.key, (), entry.dtype)
        if self._codec.compiled is None or self._codec.name not in _ON_GPU:
            raise CapabilityError(
                f"codec {self._codec.name!r} has no CUDA kernel; on a GPU there are {', '.join(_ON_GPU)}"
            )

    def prepare(self, works: Sequence[KeyWork], stream: DeviceStream) -> None:
        """Allocate the residual of each source."""
        if not self._codec.feedback:
            return
        for work in works:
            for source in range(len(work.srcs)):
                if source not in work.entry.residuals:
                    work.entry.residuals[source] = self._source_residual(work.entry, source, stream)

    def _source_residual(self, entry: DeviceKey, source: int, stream: DeviceStream) -> DeviceMemory:
        memory = entry.new_memory(_FLOAT32)
        earlier = self._feedback.remove_residual(entry.key, source)
        if earlier is not None:
            entry.upload_array(memory, earlier, stream)
        elif memory.nbytes:
            entry.place.driver.fill(memory.address, 0, memory.nbytes, stream.handle, entry.device)
        return memory

    def add(self, launches: CallLaunches, works: Sequence[KeyWork], into: Callable[[KeyWork], int]) -> None:
        """Append one launch, or three for the 16-bit codecs."""
        half = _HALVES.get(self._codec.name)
        if half is not None:
            works = self._round_sources(launches, works, half)
            spec, threshold = cuda.choose_spec("sum", "float32", count_of(w.srcs for w in works)), None
        else:
            spec = cuda.choose_spec(f"reduce_{self._codec.name}", k=count_of(w.srcs for w in works))
            threshold = np.float32(self._codec_threshold)
        rows = [self._quantised_row(work, into(work), threshold is not None) for work in works]
        launches.add(spec, rows, () if threshold is None else (threshold,))

    @property
    def _codec_threshold(self) -> float:
        compiled = self._codec.compiled
        return 0.0 if compiled is None else compiled[1]

    @staticmethod
    def _quantised_row(work: KeyWork, dst: int, quantised: bool) -> cuda.KernelRow:
        entry = work.entry
        kept = tuple(entry.residuals[i].address for i in range(len(work.srcs))) if quantised else ()
        return cuda.KernelRow(entry.numel, srcs=work.srcs, dst=dst, outs=work.outs, residuals=kept)

    @staticmethod
    def _round_sources(launches: CallLaunches, works: Sequence[KeyWork], half: str) -> list[KeyWork]:
        """Round every source to 16 bits and back, in the keys' memory."""
        down, up, rounded = [], [], []
        for work in works:
            entry, restored = work.entry, []
            for i, source in enumerate(work.srcs):
                narrow = entry.spare_memory((half, i), np.dtype(np.float16)).address
                wide = entry.spare_memory(("restored", i), _FLOAT32).address
                down.append(cuda.KernelRow(entry.numel, srcs=(source,), dst=narrow))
                up.append(cuda.KernelRow(entry.numel, srcs=(narrow,), dst=wide))
                restored.append(wide)
            rounded.append(work._replace(srcs=tuple(restored)))
        launches.add(cuda.choose_spec("cast", "float32", target=half), down)
        launches.add(cuda.choose_spec("cast", half, target="float32"), up)
        return rounded

    def gather_sum(self, launches: CallLaunches, works: Sequence[KeyWork]) -> Sequence[KeyWork]:
        """Sum into other memory than the value, for an update that then has one source."""

        def summed(work: KeyWork) -> int:
            return work.entry.spare_memory("merged", _FLOAT32).address

        self.add(launches, [work._replace(outs=()) for work in works], summed)
        return [work._replace(srcs=(summed(work),)) for work in works]
