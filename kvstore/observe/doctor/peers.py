"""Whether two processes with the same parent can read each other's memory, as workers of `shared` do."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

from .children import JOB

_WORDS = b"memory of another process"


class _Piece(ctypes.Structure):
    """The struct iovec of C."""

    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


def compare() -> None:
    """Start two processes, of which the second reads from the first; print what it has read."""
    with subprocess.Popen(
        [*JOB, "offer-memory"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as offering:
        if offering.stdout is None:
            raise OSError("the first process has no output")
        words = offering.stdout.readline().split()
        subprocess.run([*JOB, "read-memory", *words], check=False)
        offering.communicate()


def offer() -> None:
    """Print where this process has the words, and stay until stdin is closed."""
    words = ctypes.create_string_buffer(_WORDS)
    print(os.getpid(), ctypes.addressof(words), flush=True)  # noqa: T201
    sys.stdin.read()


def read(process: int, address: int) -> None:
    """Print ``yes`` if the words can be read from another process, else why not."""
    library = ctypes.CDLL(None, use_errno=True)
    here = ctypes.create_string_buffer(len(_WORDS))
    local = _Piece(ctypes.addressof(here), len(_WORDS))
    remote = _Piece(address, len(_WORDS))
    one = ctypes.c_ulong(1)
    function = library.process_vm_readv
    function.restype = ctypes.c_ssize_t
    got = function(process, ctypes.byref(local), one, ctypes.byref(remote), one, ctypes.c_ulong(0))
    if got == len(_WORDS) and here.raw == _WORDS:
        print("yes", flush=True)  # noqa: T201
    else:
        print(os.strerror(ctypes.get_errno()), flush=True)  # noqa: T201
