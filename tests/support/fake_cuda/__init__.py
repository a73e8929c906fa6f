"""A CUDA driver for machines without a GPU: the real cuda.core on device memory that is the process's own.

What of the host code cannot be tried without a GPU, can with this: allocation, copies, streams, events,
several devices and peer access, loading and launching kernels. A launch runs the kernel's body on the
processor.

In a test::

    from fake_cuda import FakeDriver
    from fake_cuda.fixtures import fake_cuda  # noqa: F401

    def test_something(fake_cuda: FakeDriver) -> None:
        ...                                             # code that uses cuda.core
        assert fake_cuda.launches == [("sum_float32_k2", 3)]

In a process of its own, call `install` before anything asks for the driver.

* The driver is of the process: it is loaded once, under the name of the real one, and stays. Where a real one
  is loaded, or found, the fixture skips the test.
* A test must leave no memory, stream or event alive (`FakeDriver.live`) that was not alive before, unless it
  says ``fake_cuda.leaks = True``. Fresh device memory is 0xA5 in every byte, freed memory 0xDB.
* ``fake_cuda.lazy = True``: work on a stream runs only when the caller waits for it. A forgotten wait or
  event then shows as poison. Copies between the device and pageable memory behave as a real driver's do.
* ``fake_cuda.peers = False``, ``fake_cuda.memory = 1 << 20``: what devices can do and have. Their number is
  always `DEVICES`, because cuda.core asks but once.
* ``fake_cuda.fail("cuMemcpyAsync", 700)`` lets a call fail once; ``fake_cuda.broken = 700`` lets all work on
  all streams fail, as after a kernel that read a wrong address.
* ``fake_cuda.calls("cuStreamSynchronize")`` counts; ``FAKE_CUDA_TRACE=1`` in the environment names each call.
* ``fake_cuda.owner(address)``: the device that owns this memory, -1 for pinned and -2 for other memory.

Kernels are not compiled for it: `install` fills a folder with files that name them, and KVSTORE_CUDA_KERNELS
says where.
"""

from .driver import DEVICES, FakeDriver, Live, driver_in_process, install

__all__ = ["DEVICES", "FakeDriver", "Live", "driver_in_process", "install"]
