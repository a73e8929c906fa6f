"""A TCP proxy that disturbs connections by a seed: it delays data, cuts connections, and stops.

It runs in a thread of the test. Bytes are passed on as they are or not at all, as TCP does; a connection that
is cut loses its data in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any

_PIECE = 1 << 16


class Proxy:
    """Listens on a port of its own for one address.

    Parameters
    ----------
    target : str
        ``"tcp://127.0.0.1:4711"``
    seed : object
        Decides when what happens.
    delay : float
        Longest time in seconds for which a piece is held back.
    cut_after : int
        Mean number of bytes after which a connection is cut; 0: never.
    """

    def __init__(self, target: str, seed: object, delay: float = 0.0, cut_after: int = 0) -> None:
        host, _, port = target.rpartition("//")[2].rpartition(":")
        self._target = host, int(port)
        self._random = random.Random(str(seed))
        self._delay, self._cut_after = delay, cut_after
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = threading.Event()
        self._flows.set()
        self._closing = False
        #: How many connections were cut.
        self.cuts = 0
        self._loop = asyncio.new_event_loop()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, sock=self._listening))
        self._loop.run_forever()
        server.close()  # before the other threads end: no thread would serve a connection that arrives now
        self._loop.run_until_complete(self._cut())
        if left := asyncio.all_tasks(self._loop):
            self._loop.run_until_complete(asyncio.wait(left, timeout=5))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        self._writers.add(back)
        if self._closing:
            await self._cut()
        await asyncio.gather(self._pass(reader, back, writer), self._pass(there, writer, back))

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, other: asyncio.StreamWriter
    ) -> None:
        left = self._random.expovariate(1 / self._cut_after) if self._cut_after else float("inf")
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE):
                if self._delay:
                    await asyncio.sleep(self._random.random() * self._delay)
                while not (self._flows.is_set() or self._closing):
                    await asyncio.sleep(0.01)
                if len(piece) >= left:
                    writer.write(piece[: int(left)])
                    self.cuts += 1
                    break
                left -= len(piece)
                writer.write(piece)
                await writer.drain()
        for one in (writer, other):
            _reset(one)
            self._writers.discard(one)

    # ------------------------------------------------------------------------------------------ from the test

    def stop(self) -> None:
        """Let nothing through, without a word to either side."""
        self._flows.clear()

    def go_on(self) -> None:
        """Let everything through again."""
        self._flows.set()

    def cut(self) -> None:
        """Cut all connections now."""
        self._call(self._cut)

    async def _cut(self) -> None:
        for writer in list(self._writers):
            self.cuts += 1
            _reset(writer)
        self._writers.clear()

    def close(self) -> None:
        """Cut everything, and listen no more."""
        self._closing = True
        self._call(self._cut)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._listening.close()

    def _call(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.run_coroutine_threadsafe(work(), self._loop).result(10)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close at once, so that the peer gets ECONNRESET and not an end of file."""
    found = writer.get_extra_info("socket")
    if found is not None and not writer.is_closing():
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
