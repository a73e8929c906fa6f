"""The switch between hosts of one machine: a process that relays between their tun devices (`relay.c`)."""

from __future__ import annotations

import ctypes
import os
import sys

from bench.peers.worker import die_with_parent


def main() -> None:
    """Relay until the parent ends.

    Arguments: code, interface, bits a second, delay, loss, seed, and the first process of each host.
    """
    die_with_parent()
    code, name, bits, delay, loss, seed, *pids = sys.argv[1:]
    run = ctypes.CDLL(code).relay_run
    numbers = (ctypes.c_int * len(pids))(*map(int, pids))
    figures = (ctypes.c_double(float(figure)) for figure in (bits, delay, loss))
    error = run(numbers, len(pids), name.encode(), *figures, ctypes.c_uint64(int(seed)), 1)
    raise SystemExit(f"no relay between hosts: {os.strerror(error)}")
