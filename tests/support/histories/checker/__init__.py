"""Decides whether a history keeps what docs/stores.md promises.

The model. A key is a register, or one for each slice where slices may be of different pushes
(`dist_async`). A value is the pushes that are in it. A push is *settled* when its process has been answered
by a call that waits for it: the push itself in `local`; else the next pull or pushpull of the key. Push n
of a process is that of round n, or of round n + base for a process that rejoined a job.

* Always (`contents`): a value has whole pushes, each once, that were called before the read returned. A push
  that a fenced process made after it, or other processes, knew of its loss, is in no value.
* sync (`rounds`): the value of round k is determined: it has the pushes 1..k of each process; of one that has
  joined, left or, with "continue", is lost, as many as there are. With "raise" a round has all members, or is
  never complete. All cells of a key are of one round. A process reads the round of its own last push; one
  that has joined, or has not begun, no round that is older than any earlier read.
* async, local (`orders`): for each cell some order of the pushes explains all reads, and keeps the order of
  calls in time: a push settled before a read was called is in it, and no push that was read is lost.
* After a loss, with "raise" (`losses`): writes raise. A read is of one round, at most one older than the
  round read before, the same for all keys that were always pushed together, and for all processes once all
  know. A read that raises names the rounds. With "continue" (`rounds`): a lost process is in all rounds that
  were read before that, in slices at most one round apart, and in none after one without it.
* Where all push in steps only (`steps`): one call reads all of a step or nothing of it; the same holds for
  all reads once all know of a loss. A step that all members have made, or that was read in all
  of its keys, is in all later reads. After the loss of a worker no read or save is refused.
* A restarted server (`forgotten`): a push settled before its last snapshot, or begun after it was
  restarted, is in all later reads.
* Calls (`calls`): each call of a living process returns, and only with errors that the faults explain.
"""

from __future__ import annotations

from ..events import History, Violation
from . import calls, contents, forgotten, losses, orders, rounds, steps


def violations(history: History) -> list[Violation]:
    """Return the promises that a history breaks; an empty list: it keeps all."""
    found = [*calls.check(history), *contents.check(history)]
    if found:
        return found  # nothing further can be said of such values
    if history.forgotten:
        return forgotten.check(history)
    if history.kind == "sync":
        found = [*rounds.check(history), *losses.check(history)]
    else:
        found = [*orders.check(history), *losses.check_writes(history)]
    return found or steps.check(history)
