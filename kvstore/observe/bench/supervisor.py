"""The command's side of all processes: starts them, hears them, and leaves none of them behind."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from kvstore.launch.child_process import ChildProcess, ProcessRole
from kvstore.launch.local_host import LocalHost
from kvstore.launch.orphan_reaper import OrphanReaper
from kvstore.launch.output import Writes
from kvstore.launch.output_relay import OutputRelay
from kvstore.launch.process import new_job
from kvstore.launch.signals import ENDING
from kvstore.observe.doctor.children import alone

from .link import CommandLink

_LOOK = 0.05  # seconds between two looks at processes that are about to end
_GRACE = 6.0  # seconds between asking a launcher to end and killing it: it ends its processes meanwhile
_GIVEN_UP = 30.0  # seconds after which nothing is waited for any more


class Interrupted(Exception):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended, because of {signal.Signals(number).name}")
        self.number = number


class Supervisor:
    """One event loop for all groups of workers, in the main thread. A context: its end kills what is left.

    Attributes
    ----------
    address : str
        Where workers find it: a name of this machine, which is no file.
    """

    def __init__(self) -> None:
        self.address = f"kvstore/bench/{new_job()}"
        self._signals: list[int] = []
        self._links: list[CommandLink] = []
        self._greeted: list[CommandLink] = []  # which have not said who they are
        with contextlib.ExitStack() as stack:
            reaper = stack.enter_context(contextlib.closing(OrphanReaper()))
            self._relay = OutputRelay((signal.SIGCHLD, *ENDING), self._on_signal)
            stack.callback(self._relay.close)
            self._host = LocalHost(self._relay, reaper, prefix=False)
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind("\0" + self.address)
            self._listener.listen(128)
            self._listener.setblocking(False)
            self._relay.watch(self._listener.fileno(), self._accept)
            self._stack = stack.pop_all()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(
        self, name: str, command: Sequence[str], variables: Mapping[str, str], lines: Writes
    ) -> ChildProcess:
        """Start a launcher; what it and its workers print goes to `lines`.

        Raises
        ------
        ConfigError
            It cannot be started.
        """
        environment = {**variables, **alone(), "PYTHONUNBUFFERED": "1"}
        return self._host.start(ProcessRole(name, 0), command, environment, sinks=(lines, lines))

    def take(self, wanted: Callable[[CommandLink], bool]) -> list[CommandLink]:
        """Hand over those of the newcomers that are wanted, each once."""
        taken = [link for link in self._greeted if wanted(link)]
        self._greeted = [link for link in self._greeted if link not in taken]
        return taken

    def until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait until it is so; False if it is not within these seconds.

        Raises
        ------
        Interrupted
            A signal came.
        """
        deadline = time.monotonic() + seconds
        while not done():
            if self._signals:
                raise Interrupted(self._signals[0])
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self._relay.turn(left, lambda: None)
        return True

    def end(self, child: ChildProcess, links: Callable[[], Sequence[CommandLink]], leave: float) -> None:
        """Hang up; ask a launcher to end that is still there after `leave` seconds, and later kill it.

        `links` gives those of its workers, also of those that come only now.
        """
        began, asked = time.monotonic(), False
        while not self._is_gone(child) and time.monotonic() < began + leave + _GIVEN_UP:
            if self._signals[1:]:  # whoever presses Ctrl-C twice does not want to wait
                child.end(signal.SIGKILL)
            elif not asked and time.monotonic() > began + leave:
                asked = True
                child.end(signal.SIGTERM, _GRACE)
            for link in links():
                self.hang_up(link)
            self._relay.turn(_LOOK, lambda: None)

    def hang_up(self, link: CommandLink) -> None:
        """Close a line; a second call does nothing."""
        if link in self._links:
            self._links.remove(link)
            self._relay.forget(link.fileno())
            link.close()

    def _is_gone(self, child: ChildProcess) -> bool:
        """Whether a launcher and what was in its group are gone; what it has printed is read by then."""
        if not (child.ended() and child.gone()):
            return False
        self._host.forget(child)
        return True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            link = CommandLink(self._listener.accept()[0])
            if not link.is_ours():
                link.close()
                return
            self._links.append(link)
            self._greeted.append(link)
            self._relay.watch(link.fileno(), lambda: self._read(link))

    def _read(self, link: CommandLink) -> None:
        link.read()
        if link.closed:
            self.hang_up(link)

    def _on_signal(self, number: int) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)
