"""The variables with which PyTorch's ``env://`` finds the workers of a job: RANK, MASTER_PORT and others.

They have the same meaning as in torchrun. Only workers get them, since servers and scheduler are no ranks.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from ..errors import ConfigError
from .environment import text_of
from .ports import bound_in_range, port_range

#: Variables of a torchrun that has started the launcher; with them, workers would connect to its store.
_OUTER_PREFIX = "TORCHELASTIC_"
_TRIES = 100  # pairs of ports


class MasterPort:
    """A free port of this machine for MASTER_PORT, and the next one for the rendezvous of `nccl`.

    Both are bound until `close`, and do not listen: so the system assigns them to no other socket, and worker
    0 can bind them with SO_REUSEADDR, as PyTorch does.

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
        if bound_in_range(self._bind_ports, OSError, "this machine, with its neighbour", ports) is None:
            self._bind_anywhere()
        self.number: int = self._sockets[0].getsockname()[1]

    def close(self) -> None:
        """Close the sockets that hold the ports."""
        for held in self._sockets:
            held.close()

    def _bind_anywhere(self) -> None:
        for _ in range(_TRIES):
            with contextlib.suppress(OSError, OverflowError):  # 65535 has no neighbour
                self._bind_ports(0)
                return
        raise ConfigError(
            "this machine has no two neighbouring free ports for MASTER_PORT: end processes that hold ports"
        )

    def _bind_ports(self, port: int) -> bool:
        """Bind a port and its neighbour; OSError if one is in use, or outside of the range."""
        if port and port + 1 not in self._range:
            raise OSError(f"port {port + 1} is not of the range")
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(_bound_socket(port))
            second = stack.enter_context(_bound_socket(first.getsockname()[1] + 1))
            stack.pop_all()
        self._sockets = [first, second]
        return True


def _bound_socket(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.bind(("", port))
        # Only after `bind`, so that two jobs cannot hold one port.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        made.close()
        raise
    return made


def torch_variables(
    rank: int, size: int, local: tuple[int, int], host: int, master: tuple[str, int]
) -> dict[str, str]:
    """Return the variables of a worker.

    Parameters
    ----------
    rank, size : int
        Rank of the worker, and number of workers of the job.
    local : tuple of int
        Rank of the worker among those of its machine, and their number.
    host : int
        Number of the machine, from 0.
    master : tuple
        Address of worker 0, and a port of its machine.
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


def outer_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables of an outer torchrun, which workers must not have."""
    return [name for name in environment if name.startswith(_OUTER_PREFIX)]
