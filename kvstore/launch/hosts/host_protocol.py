"""Where processes of a job run, as far as the job cares: on this machine, or on hosts that ssh reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.settings.keys import Keys

from ..child_process import ProcessRole
from ..process import GRACE


@dataclass(frozen=True)
class HostLoss:
    """What ended the way to processes: a sentence, and the last words on stderr of what led there."""

    text: str
    tail: Sequence[bytes]


class Running(Protocol):
    """A process that was started, and what it starts."""

    @property
    def part(self) -> ProcessRole:
        """Say what it is in its job."""

    @property
    def code(self) -> int | None:
        """Exit code once it has ended; negative for a signal."""

    @property
    def how(self) -> str:
        """Say who it is and how it ended."""

    @property
    def tail(self) -> Sequence[bytes]:
        """The last lines of its stderr."""

    def ended(self) -> bool:
        """Whether it has ended."""

    def stopped(self) -> bool:
        """Whether it is known to stand still, as after SIGSTOP."""

    def end(self, number: int, grace: float = GRACE) -> None:
        """Send a signal to it and to what it has started; kill what is there `grace` seconds later."""

    def gone(self) -> bool:
        """Whether nothing of it is left, once `ended` has said that it has."""


class HostProtocol(Protocol):
    """Starts processes, and knows what can happen on the way to them."""

    @property
    def ready(self) -> bool:
        """Whether processes can be started."""

    @property
    def variables(self) -> Mapping[str, str]:
        """What processes find in their environment, unless told otherwise."""

    def local(self, rank: int) -> tuple[int, int] | None:
        """Rank and number of a worker on its machine; None where there is but one machine."""

    def start(
        self,
        part: ProcessRole,
        command: Sequence[str],
        environment: Mapping[str, str],
        keys: Keys | None = None,
        told: Callable[[str], None] | None = None,
    ) -> Running:
        """Start a process; `told` is called with the address that it tells, empty where none will come."""

    def forget(self, process: Any) -> None:
        """Pass on what is left of the output of a process that is gone."""

    def look(self) -> HostLoss | None:
        """Do what time asks for, and say what is lost."""

    def close(self) -> None:
        """Close what leads to the processes; nothing is started or heard of any more."""
