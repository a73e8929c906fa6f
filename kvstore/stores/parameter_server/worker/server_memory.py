"""Where servers of this machine have their values: memory that a worker reads, one for each server."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..transport.shared_buffers import PeerBuffers


class ServerMemory:
    """The memory of each server, if this process can read it; not `enabled`: it shares none at all."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._buffers: dict[Hashable, PeerBuffers | None] = {}

    def open(self, server: Hashable, handle: str) -> None:
        """Open the memory that a server has told of, if it has."""
        self._buffers[server] = PeerBuffers.open(handle) if handle and self._enabled else None

    def get(self, server: int) -> PeerBuffers | None:
        """Return the memory of a server."""
        return self._buffers.get(server)

    def has_all(self, servers: Iterable[int]) -> bool:
        """Whether each of these servers shares memory with this process."""
        return all(self._buffers.get(server) for server in servers)

    def forget(self, server: int) -> None:
        """Another process takes the server's place."""
        self._buffers.pop(server, None)

    def close(self) -> None:
        """Let all memory go."""
        for buffers in self._buffers.values():
            if buffers is not None:
                buffers.close()
        self._buffers.clear()
