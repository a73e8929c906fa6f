"""CUDA kernels: one launch for all keys of a call, compiled ahead of time or once per machine.

A `KernelSpec` names a kernel. The arguments of a launch are an *image*: one array of 64-bit words with the
addresses of all keys. `launch_image` makes it from one `KernelRow` for each key, and the program copies it
unchanged to the device::

    spec = choose_spec("sum", "float32", 4)
    words, chunks = launch_image(spec, [KernelRow(numel, srcs=(a, b, c, d), dst=w, outs=(x, y)), ...])
    ...                                   # copy `words` to `address` on the device
    load_kernel(spec, device)(stream, address, chunks)

The same call on a `HostKernel` runs the same body on host memory. An image does not contain its own
address: it is valid at any address, as long as the addresses in it are.

This package imports numba and cuda only when needed; a process that finds its kernels in the cache, or in
the folder that KVSTORE_CUDA_KERNELS names, never imports numba.
"""

from .constants import WIDTH, row_constants
from .host import HostKernel
from .launch import LoadedKernel, load_kernel
from .spec import CODECS, RULE_STATES, KernelSpec, all_specs, choose_spec
from .table import BLOCK, KernelRow, launch_image

__all__ = [
    "BLOCK",
    "CODECS",
    "RULE_STATES",
    "WIDTH",
    "HostKernel",
    "KernelRow",
    "KernelSpec",
    "LoadedKernel",
    "all_specs",
    "choose_spec",
    "launch_image",
    "load_kernel",
    "row_constants",
]
