"""Why a server refuses a request, in words for the worker that made it."""

from __future__ import annotations

from ..protocol.messages import Failure, Kind, Record


def no_value(store: int, slice_: int, restarted: bool) -> Failure:
    """Make the error of a request for a slice that has no value, perhaps since the server was restarted."""
    what = f"slice {slice_} of store {store}"
    if restarted:
        text = f"{what} is lost: its server was started again, and there is no snapshot of it"
        return Failure("StateFileError", f"{text}; start the job again from what was saved last")
    return Failure("KeyNotFoundError", f"{what} has no value on this server; init its key first")


def not_in_protocol(store: int, rank: int, record: Record) -> Failure:
    """Make the error of a request that the protocol does not know."""
    bad = record.kind == Kind.BAD
    why = "numbers of a request do not fit together" if bad else f"no request has kind {int(record.kind)}"
    return _violation(store, rank, record, f"{why}; the request was not carried out")


def out_of_order(store: int, rank: int, record: Record, complete: int) -> Failure:
    """Make the error of a push into a round that this worker cannot have come to."""
    return _violation(
        store, rank, record, f"push {record.round} is out of order: round {complete} is complete"
    )


def _violation(store: int, rank: int, record: Record, why: str) -> Failure:
    return Failure("ProtocolError", f"worker {rank}, slice {record.slice} of store {store}: {why}")
