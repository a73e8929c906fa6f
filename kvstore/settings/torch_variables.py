"""The variables by which PyTorch's ``env://``, and what builds on it, finds the other workers of a job.

They have the meaning that torchrun gives them. Only workers get them: servers and scheduler are no ranks.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from ..errors import ConfigError
from .ports import bound_in_range, port_range
from .variables import text_of

#: What a torchrun that has started the launcher leaves behind: workers would look for its store.
_LEFT_BEHIND = "TORCHELASTIC_"
_TRIES = 100  # pairs of ports


class MasterPort:
    """A free port of this machine for MASTER_PORT, and the next one, on which `nccl` meets.

    Both are bound here and do not listen, until `close`: so the system gives them to nothing else, and
    worker 0 can bind them with SO_REUSEADDR, as PyTorch does.

    Parameters
    ----------
    ports : str, optional
        The value of KVSTORE_PORTS. With None, that of this process.

    Raises
    ------
    ConfigError
        No two neighbouring ports are free.
    """

    def __init__(self, ports: str | None = None) -> None:
        self._sockets: list[socket.socket] = []
        ports = text_of("ports") if ports is None else ports
        self._range = port_range(ports)
        if bound_in_range(self._bind, OSError, "this machine, with its neighbour", ports) is None:
            self._bind_anywhere()
        self.number: int = self._sockets[0].getsockname()[1]

    def close(self) -> None:
        """Let go of the ports."""
        for one in self._sockets:
            one.close()

    def _bind_anywhere(self) -> None:
        for _ in range(_TRIES):
            with contextlib.suppress(OSError, OverflowError):  # 65535 has no neighbour
                self._bind(0)
                return
        raise ConfigError("this machine has no two free ports for MASTER_PORT: end what holds them")

    def _bind(self, port: int) -> bool:
        """Bind a port and its neighbour; OSError: one is taken, or not of the range."""
        if port and port + 1 not in self._range:
            raise OSError(f"port {port + 1} is not of the range")
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(_bound(port))
            second = stack.enter_context(_bound(first.getsockname()[1] + 1))
            stack.pop_all()
        self._sockets = [first, second]
        return True


def _bound(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.bind(("", port))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # now: two jobs must not hold one port
    except OSError:
        made.close()
        raise
    return made


def torch_variables(
    rank: int, size: int, local: tuple[int, int], host: int, master: tuple[str, int]
) -> dict[str, str]:
    """Make the variables of a worker.

    Parameters
    ----------
    rank, size : int
        Of the job.
    local : tuple of int
        Rank and number on the machine.
    host : int
        Number of the machine, from 0.
    master : tuple
        Address of worker 0 and a port there.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local[0]),
        "LOCAL_WORLD_SIZE": str(local[1]),
        "GROUP_RANK": str(host),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }


def left_behind(environment: Mapping[str, str]) -> list[str]:
    """List the variables of an outer torchrun that workers must not have."""
    return [name for name in environment if name.startswith(_LEFT_BEHIND)]
