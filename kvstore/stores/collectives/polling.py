"""Engines that do not notify the end of an operation, and are polled."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ...errors import KVStoreError, TimeoutError
from ...waiting import WaitClock
from .backend import check_process

_NAP = 100e-6  # seconds between two polls; Horovod's own thread polls once in a millisecond


@dataclass(eq=False, slots=True)
class PolledOperation:
    """Operations of an engine that are waited for together."""

    what: str
    #: Running operations, in the engine's own class.
    left: list[Any] = field(default_factory=list)
    error: KVStoreError | None = None


class PolledEngine:
    """The waits for such an engine; subclasses poll it, and receive the results.

    Each wait ends after `timeout` seconds. Stores of a group are paired by the order of their creation.
    """

    name: str
    #: The engine's name as its authors write it, and the condition for an operation to complete.
    _title: str
    _needs: str
    rank: int

    def __init__(self, timeout: float, log: logging.Logger) -> None:
        check_process(self.name)
        self._timeout, self._log = timeout, log
        self._lock = threading.Lock()
        self._broken: str | None = None

    def abandon(self) -> None:
        """Let `close` return without a wait; the other processes wait until they notice."""
        self._broken = "the store was left by an error"

    def _is_done(self, one: Any) -> bool:
        raise NotImplementedError

    def _receive_result(self, operation: PolledOperation, one: Any) -> None:
        """Receive a result, or keep its error."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._broken is not None:
            raise KVStoreError(f"worker {self.rank}: {self._broken}; start the job again")

    def _finish_operation(self, operation: PolledOperation) -> None:
        self._until_complete(operation)
        if operation.error is not None:
            raise operation.error

    def _until_complete(self, operation: PolledOperation) -> None:
        clock = WaitClock(self._timeout)
        while True:
            waited = clock.read()
            if self._receive_complete(operation):
                return
            if clock.is_over:
                self._give_up(operation, waited)
            if clock.notice_due():
                text = "worker %d has waited %.0f s for %s; all workers must call it"
                self._log.warning(text, self.rank, waited, operation.what)
            time.sleep(_NAP)

    def _receive_complete(self, operation: PolledOperation) -> bool:
        """Receive the complete results, and return whether these are all."""
        with self._lock:
            while operation.left and self._is_done(operation.left[-1]):
                self._receive_result(operation, operation.left.pop())
            return not operation.left

    def _give_up(self, operation: PolledOperation, waited: float) -> NoReturn:
        self._broken = f"worker {self.rank} has waited {waited:.0f} s for {operation.what}"
        raise TimeoutError(
            f"{self._broken}: all workers must call it, and {self._needs}; {self._title} cannot "
            "cancel it, so start the job again"
        )
