"""What becomes of quick calls on servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pace
import pytest

from kvstore.stores.parameter_server.worker.driver import MachineDriver
from kvstore.stores.parameter_server.worker.quick_calls import QuickCall


class Quick:
    """Counts what becomes of quick calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = self.begun = self.adopted = 0
        begin, adopt = MachineDriver.begin, QuickCall.adopt

        def began(driver: MachineDriver, call: QuickCall) -> bool:
            self.asked += 1
            done = begin(driver, call)
            self.begun += done
            return done

        def adopted(call: QuickCall, *arguments: Any) -> Any:
            self.adopted += 1
            return adopt(call, *arguments)

        monkeypatch.setattr(MachineDriver, "begin", began)
        monkeypatch.setattr(QuickCall, "adopt", adopted)

    def call(self, call: Callable[[], object], adopted: bool | None = False) -> None:
        """Repeat a call until it was quick: when it is time to look at the clock, it is a usual one."""
        end = pace.deadline(20)
        while True:
            begun, before = self.begun, self.adopted
            call()
            if self.begun > begun and adopted in (None, self.adopted > before):
                return
            assert time.monotonic() < end, f"{self.asked} asked, {self.begun} begun, {self.adopted} adopted"
