"""One small change of the code, and the files in which there are some."""

from __future__ import annotations

from typing import NamedTuple

_SERVER = "kvstore/stores/parameter_server/server/"
_NATIVE = "kvstore/stores/parameter_server/native/"
REQUESTS, ROUNDS = _SERVER + "slice_requests.py", _SERVER + "slice_rounds.py"
MEMBERS = _SERVER + "round_members.py"
STORE, SESSIONS = _SERVER + "store_machine.py", _SERVER + "worker_sessions.py"
C_ROUNDS, C_SESSIONS = _NATIVE + "rounds.h", _NATIVE + "sessions.h"
READS = "kvstore/stores/parameter_server/worker/consistent_rounds.py"
_SHARED = "kvstore/stores/shared/native/"
SHARED_OPTIMIZER = "kvstore/stores/shared/optimizer.py"
SERVED_OPTIMIZER = _SERVER + "optimizer.py"
WORKER_OPTIMIZER = "kvstore/stores/parameter_server/worker/optimizer.py"
ARRIVALS, CHUNKS, ROUND = _SHARED + "arrivals.h", _SHARED + "chunks.h", _SHARED + "round.h"

#: What judges: histories of jobs in the simulator, or of real processes; or random programs. All else is the
#: name of a test.
SIMULATED, PROCESSES, PROGRAMS = "simulated", "processes", "programs"


class Mutant(NamedTuple):
    """A text that is replaced by another, the promise that this breaks, and the run that detects it."""

    group: str
    file: str
    old: str
    new: str
    why: str
    by: str = SIMULATED
