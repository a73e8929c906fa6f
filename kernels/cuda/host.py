"""The same kernels on host memory: this process does the work of a launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .spec import KernelSpec
from .table import BLOCK


class HostKernel:
    """A kernel that runs its body on the processor, block after block and thread after thread.

    For tests, and for drivers that are none: it is called as `Kernel` is, with host addresses, and returns
    when the work is done. Results are those of the device, bit for bit.

    Parameters
    ----------
    spec : Spec
    compiled : bool, default True
        Compile the body with numba, at the first call, which takes about a second. False: interpret it, which
        is for small arrays; vector accesses then check that they are aligned.
    """

    def __init__(self, spec: KernelSpec, compiled: bool = True) -> None:
        self.spec = spec
        self._compiled = compiled

    def __call__(self, stream: Any, image: int, chunks: int, *scalars: Any) -> None:
        """Run; parameters as for `Kernel`, `stream` is not looked at."""
        wanted = len(self.spec.scalars)
        if len(scalars) != wanted or not all(isinstance(x, np.float32) for x in scalars):
            raise TypeError(f"{self.spec.name} takes {wanted} numpy.float32 after the image, got {scalars}")
        scalar = scalars[0] if scalars else np.float32(0)
        with np.errstate(all="ignore"):
            _host_runner(self.spec, self._compiled)(chunks, image, scalar)


@cache
def _host_runner(spec: KernelSpec, compiled: bool) -> Callable[[int, int, Any], None]:
    from .bodies.from_spec import body_of_spec

    one = body_of_spec(spec)

    def run(chunks: int, image: int, scalar: Any) -> None:
        for block in range(chunks):
            for thread in range(BLOCK):
                one(block, thread, image, scalar)

    if not compiled:
        return run
    from .bodies.targets import njit

    return njit(run)
