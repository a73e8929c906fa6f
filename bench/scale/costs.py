"""The costs of the processes of a job: seconds of a core for each call, message, request and byte."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Costs:
    """Seconds of a core, as `calibrate` finds them on a machine."""

    #: Of a call of the store; of a message to or from a server; of a slice in one
    worker_call: float
    worker_message: float
    worker_request: float
    #: Of a byte that is sent, and of one that is received
    worker_push: float
    worker_pull: float
    worker_pack: float  # of a byte of gradients that 2bit packs
    #: The same for a server
    server_message: float
    server_request: float
    #: Of a byte that is received and summed, and of one that is sent
    server_push: float
    server_pull: float
    server_unpack: float  # of a byte of gradients as it was before it was packed: decoded and summed
    control_message: float  # of a message to or from the scheduler, at each end
    #: Of a byte of such a message that is encoded and checked, that is read, and that is sent as it is
    control_encode: float
    control_decode: float
    control_copy: float
    #: The same of messages that only have names of keys
    names_encode: float
    names_decode: float
    #: Of a heartbeat at the scheduler, question and answer; and seconds a second of a scheduler without any
    beat: float
    idle: float
    #: Seconds for a byte of a sum within a host of `host_workers` workers, there and back, of all its cores
    host_sum: float
    host_workers: int  # of which that was measured

    def to_json(self) -> dict[str, Any]:
        """Return all costs by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Costs:
        """Return the costs of `to_json`."""
        return cls(**{one.name: found[one.name] for one in fields(cls)})
