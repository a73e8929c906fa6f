"""The texts of errors about lost processes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .messages import Failure, Loss

_AGAIN = "start the job again, from what was saved last"
#: Advice where hosts push and not workers.
ANEW = "start the job again, or use hierarchy='flat'"


def loss_failure(losses: Sequence[Loss], servers: int = 0) -> Failure:
    """Return the error of the remaining processes: it is about the first loss, and names the others.

    `servers`: the number of servers of the job.
    """
    if not losses:
        return Failure("PeerLostError", "a process of the job is lost")
    first = losses[0]
    others = "".join(f", and {_process_name(one)}" for one in losses[1:])
    text = f"{_process_name(first)} is lost: {_how_lost(first)}{others}; {_loss_advice(losses, servers)}"
    return Failure("PeerLostError", text, first.role, first.rank, first.silent)


def _loss_advice(losses: Sequence[Loss], servers: int) -> str:
    gone = len({one.rank for one in losses if one.role == "server"})
    if losses[0].role == "scheduler" or gone >= max(servers, 1):
        return _AGAIN
    which = "values on other servers" if gone else "values"
    return f"{which} can still be read and saved, then start the job again"


def host_is_gone(rank: int) -> Failure:
    """Return the error of a worker that returned after all workers of its host had left."""
    text = f"worker {rank} came back, and its host had no other worker left to hold its part; {ANEW}"
    return Failure("PeerLostError", text, "worker", rank)


def no_scheduler_failure(where: str, silent: float) -> Failure:
    """Return the error of a process that found no scheduler."""
    text = f"no scheduler has answered at {where} for {silent:.1f} s: start it, or check the address"
    return Failure("TimeoutError", text)


def stopped_failure(who: str, seconds: float, patience: float, why: Failure) -> Failure:
    """Extend the error of a process that did not run for a while and was removed from its job."""
    ended = "no scheduler answers since then: the job has ended, or has gone on without it"
    what = ended if why.role == "scheduler" else why.text
    text = (
        f"{who} was stopped itself, or slept: it stood still for {seconds:.1f} s, and a stopped process "
        f"counts as lost after {patience:g} s (KVSTORE_DEAD_AFTER); {what}; start the job again from what "
        "was saved last"
    )
    return msgspec.structs.replace(why, text=text)


def _how_lost(loss: Loss) -> str:
    return f"no heartbeat of it has arrived for {loss.silent:.1f} s" if loss.silent > 0 else "it has failed"


def _process_name(loss: Loss) -> str:
    return loss.role if loss.role == "scheduler" else f"{loss.role} {loss.rank}"
