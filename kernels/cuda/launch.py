"""Kernels on a device, launched through cuda.core: a tenth of the time that numba takes, or less."""

from __future__ import annotations

import threading
from typing import Any

from .cache import find_kernel
from .spec import KernelSpec
from .table import BLOCK

#: Launch configurations that a kernel keeps; a process has few different numbers of chunks.
_MOST_CONFIGS = 256

_loaded: dict[tuple[KernelSpec, int], LoadedKernel] = {}
_lock = threading.Lock()


class LoadedKernel:
    """A kernel on one device; made by `load_kernel`.

    Attributes
    ----------
    spec : Spec
    device : int
        Ordinal of its device.
    """

    __slots__ = ("_configs", "_function", "_launch", "_make_config", "device", "spec")

    def __init__(self, spec: KernelSpec, device: int, function: Any) -> None:
        from cuda.core import LaunchConfig, launch

        self.spec = spec
        self.device = device
        self._function = function
        self._launch = launch
        self._make_config = LaunchConfig
        self._configs: dict[int, Any] = {}

    def __call__(self, stream: Any, image: int, chunks: int, *scalars: Any) -> None:
        """Put one launch on a stream; the host does not wait.

        Parameters
        ----------
        stream : cuda.core.Stream
            A stream of the device of the kernel; the context of this device must be current.
        image : int
            Address, on the device, of the words that `table.launch_image` made for the same spec.
        chunks : int
            Number of blocks, as `table.launch_image` returned it. Nothing is launched for 0.
        *scalars : numpy.float32
            What `Spec.scalars` names. Python floats would be passed in eight bytes: they are not allowed.
        """
        if chunks:
            self._launch(stream, self._launch_config(chunks), self._function, image, *scalars)

    def _launch_config(self, chunks: int) -> Any:
        config = self._configs.get(chunks)
        if config is None:
            if len(self._configs) >= _MOST_CONFIGS:
                self._configs.clear()
            config = self._configs[chunks] = self._make_config(grid=chunks, block=BLOCK)
        return config


def load_kernel(spec: KernelSpec, device: Any = 0, directory: str | None = None) -> LoadedKernel:
    """Return a kernel, ready to launch on a device.

    Taken from the folder that `directory` or KVSTORE_CUDA_KERNELS names, else from the user's cache, else
    compiled, which takes about a second, once on a machine. The same object is returned for the same spec and
    device.

    Parameters
    ----------
    spec : Spec
    device : int or cuda.core.Device
    directory : str or None
        Folder that ``python -m kvstore.kernels.cuda build`` made.

    Raises
    ------
    ImportError
        cuda.core is not installed; or the kernel must be compiled, and numba-cuda is not installed.
    """
    from cuda.core import Device, ObjectCode

    place = Device(device) if isinstance(device, int) else device
    key = (spec, place.device_id)
    kernel = _loaded.get(key)
    if kernel is None:
        with _lock:
            kernel = _loaded.get(key)
            if kernel is None:
                capability = place.compute_capability
                cubin = find_kernel(spec, (capability.major, capability.minor), directory)
                function = ObjectCode.from_cubin(cubin.code, name=spec.name).get_kernel(cubin.entry)
                kernel = _loaded[key] = LoadedKernel(spec, place.device_id, function)
    return kernel
