"""The supervisor: it starts, polls and ends processes of a job, and writes their output.

`kvstore run` (`run.py`) and `kvstore role` (`role.py`) derive from it. One thread waits in one event loop,
until a process writes, a reader of the output is ready, or a signal arrives. The ends of processes are
signals too (SIGCHLD), or messages of another host.

State        next                       when
REACHING     OPENING or RUNNING         the hosts can start processes
OPENING      RUNNING                    the scheduler has reported its address
each         ending                     a process has failed, or a signal has arrived

At the end the workers are ended first. Servers and scheduler follow, so that they can answer the workers.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from enum import Enum, auto

from kvstore.waiting import WaitClock

from .causes import FailureCauses, patience
from .child_process import SupervisedProcess
from .hosts.remote_hosts import RemoteHosts
from .local_host import LocalHost
from .output_relay import LAST_WORDS, OutputRelay
from .process import exit_code
from .signals import ASKING, ENDING

FIRST_WORD = 60.0  # seconds within which a scheduler must report its address
_LOOK = 0.05  # seconds between two polls of groups that are about to end
_SERVICE_GRACE = 3.0  # seconds between the request to servers and scheduler to end, and SIGKILL


class Stage(Enum):
    """The progress of a job; see the table at the head of this file."""

    REACHING = auto()
    OPENING = auto()
    RUNNING = auto()


class Supervisor:
    """The processes that this process has started; `command` is its name in messages."""

    command = "kvstore"
    #: Seconds in which servers and scheduler end by themselves after the last worker; None: for ever.
    leave: float | None = None
    #: Whether a second signal kills all processes.
    kills_at_second_signal = True

    def __init__(self) -> None:
        self.relay = OutputRelay((signal.SIGCHLD, *ASKING, *ENDING), self.on_signal)
        self.hosts: LocalHost | RemoteHosts
        self.stage = Stage.REACHING
        #: The latest time for the address of the scheduler.
        self.first_word = 0.0
        self.running: list[SupervisedProcess] = []
        #: Processes of whose groups something may be left.
        self.left: list[SupervisedProcess] = []
        self.causes: FailureCauses[SupervisedProcess] = FailureCauses()
        self.failure: str | None = None
        self.failed: SupervisedProcess | None = None
        self.signal: int | None = None
        #: When the last worker was gone.
        self.leaving: float | None = None
        #: Whether servers and scheduler were asked to end.
        self.asked = False

    def run(self) -> int:
        """Run the processes until all are gone; return the exit code of the command."""
        with contextlib.closing(self.relay):
            try:
                self.start_first()
                while self.left or not (self.is_ending or self.stage is Stage.RUNNING):
                    self._run_once()
                self.report_end()
                self._write_out()
            finally:
                self._signal_all(self.left, signal.SIGKILL)
                self.hosts.close()
        if self.failure is None:
            return 128 + self.signal if self.signal else 0
        return exit_code((self.failed.code if self.failed else None) or 1)

    # ----------------------------------------------------------------------------- for the derived classes

    def start_first(self) -> None:
        """Start the first processes, if the hosts are ready."""
        raise NotImplementedError

    def start_all(self, address: str) -> None:
        """Start the processes that need the address of the scheduler."""
        raise NotImplementedError

    def loop_timeout(self) -> float | None:
        """Return the seconds after which the loop continues without an event."""
        return max(0.0, self.first_word - time.monotonic()) if self.stage is Stage.OPENING else None

    def possible_causes(self, running: list[SupervisedProcess]) -> list[SupervisedProcess]:
        """Return the processes that can be the cause of the failure of another process."""
        return running

    def on_end(self, process: SupervisedProcess) -> None:
        """Handle the end of a process, before it is known whether this is a failure of the job."""

    def on_failure(self, process: SupervisedProcess) -> None:
        """Handle the failure of a process: end the job."""
        self.failed = process
        self.fail_job(process.end_sentence)

    def check_output(self) -> None:
        """Fail if the output cannot be written."""
        if self.relay.reason and not self.is_ending:
            self.fail_job(f"all workers are ended: their output cannot be written: {self.relay.reason}")

    def report_end(self) -> None:
        """Write why the job has ended; all its processes are gone."""

    # -------------------------------------------------------------------------------------------- starting

    def add_process(self, process: SupervisedProcess) -> None:
        """Poll a process from now on."""
        self.running.append(process)
        self.left.append(process)

    def await_address(self) -> None:
        """Wait for the address that the scheduler reports."""
        self.stage = Stage.OPENING
        self.first_word = time.monotonic() + FIRST_WORD

    def on_address(self, address: str) -> None:
        """Handle the address that a scheduler has reported, or an empty one: it will report none."""
        if not address:  # if the scheduler has ended, that is the error, and it is known soon
            self.first_word = min(self.first_word, time.monotonic() + LAST_WORDS)
        elif not self.is_ending and self.stage is Stage.OPENING:  # a restarted scheduler reports again
            self.stage = Stage.RUNNING
            self.start_all(address)

    # --------------------------------------------------------------------------------------------- waiting

    @property
    def is_ending(self) -> bool:
        """Whether the job is about to end before its workers have finished."""
        return bool(self.signal or self.failure)

    def _run_once(self) -> None:
        leaving = self.leave is not None and self.leaving is not None
        soon = self.is_ending or leaving or self.causes.has_waiting or len(self.running) < len(self.left)
        self.relay.run_once(_LOOK if soon else self.loop_timeout(), self.poll_processes)
        if self.hosts.remote:  # the messages of the turn may be about ends
            self.poll_processes()
        self.check_output()

    def poll_processes(self) -> None:
        """Handle the ends of processes, and what else depends on the time.

        The event loop calls it before it reads output: a flood of output must not delay the order of ends.
        """
        running, self.running = self.running, []
        ended: list[SupervisedProcess] = []
        for process in running:
            (ended if process.has_ended() else self.running).append(process)
        for process in ended:
            self.on_end(process)
            if process.code or self.stage is not Stage.RUNNING:  # the scheduler, before other processes
                self.causes.add_failure(process, self.possible_causes(running))
        for process in self.causes.pop_causes():
            if not (self.is_ending or self.asked):
                self.on_failure(process)
        for process in [process for process in self.left if process.is_gone()]:
            self.left.remove(process)
            self.hosts.forget_process(process)
        if self.stage is Stage.OPENING and not self.is_ending and time.monotonic() > self.first_word:
            self.fail_job("the scheduler did not say where it is")
        self._end_services()

    def _end_services(self) -> None:
        """End servers and scheduler when no worker is left."""
        if self.stage is not Stage.RUNNING and not self.is_ending:
            return
        if any(process.part.role == "worker" for process in self.left):
            return
        now = time.monotonic()
        self.leaving = self.leaving or now
        late = self.leave is not None and now > self.leaving + self.leave
        if not self.asked and (self.is_ending or late):
            self.asked = True
            for process in self.left:
                process.end_with(signal.SIGTERM, _SERVICE_GRACE)

    # ---------------------------------------------------------------------------------------------- ending

    def fail_job(self, text: str) -> None:
        """End the job, for this reason."""
        self.failure = text
        self._signal_all(self._workers_or_all(), signal.SIGTERM)

    def on_signal(self, number: int) -> None:
        """Pass a signal on: requests to all processes, others to the workers, which are to end."""
        if number == signal.SIGCHLD:
            return  # it only ends the wait
        if number in ASKING:
            for process in self.left:
                process.ask_for_report(ASKING[signal.Signals(number)])
            return
        again, self.signal = self.signal is not None, number
        if again and self.kills_at_second_signal:
            self._signal_all(self.left, signal.SIGKILL)
            return
        for process in self._workers_or_all():  # SIGINT would end a scheduler with a traceback of its imports
            passed_on = process.part.role == "worker" and number != signal.SIGPIPE
            process.end_with(number if passed_on else signal.SIGTERM)

    def _workers_or_all(self) -> list[SupervisedProcess]:
        """Return the processes to end first: the workers, if there are any."""
        return [process for process in self.left if process.part.role == "worker"] or self.left

    def _signal_all(self, processes: Sequence[SupervisedProcess], number: int) -> None:
        for process in processes:
            process.end_with(number)

    def _write_out(self) -> None:
        """Wait for the readers of the output while they read, and report what they have lost."""
        before, clock = self.failure, WaitClock(patience())

        def turn() -> None:
            clock.read()
            if clock.notice_due():
                self.write_message("all processes have ended; it waits for the reader of their output")
            self._run_once()

        self.relay.write_out(turn, patience(), lambda: self.signal)
        if self.failure and not before:
            self.write_message(self.failure)
            self.relay.write_out(self._run_once, LAST_WORDS, lambda: self.signal)

    def write_message(self, text: str) -> None:
        """Write a line to stderr."""
        self.relay.err.write(f"{self.command}: {text}\n".encode())
