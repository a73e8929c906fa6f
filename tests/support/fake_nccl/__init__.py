"""NCCL for machines without a GPU: the real nccl4py on a library that sums memory of fake devices.

It shows what a store asks of NCCL: communicators, groups, order, counts, element types, streams, what becomes
of errors. How NCCL itself behaves, it does not show: that takes GPUs (tests marked `gpu`).

In a test, after fake_cuda's driver is installed::

    nccl = fake_nccl.install()
    ...                                # code that uses nccl4py
    assert nccl.history() == ["all_reduce float32 6 op 0 root 0 of 2"]

* ``nccl.fail("ncclAllReduce", 3)`` lets a call fail once; ``nccl.calls("ncclGroupEnd")`` counts.
* ``nccl.live()``: communicators that were made and neither destroyed nor aborted.
"""

from .library import FakeNccl, install, missing

__all__ = ["FakeNccl", "install", "missing"]
