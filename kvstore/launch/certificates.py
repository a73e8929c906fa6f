"""The keys of a job: its launcher generates them, and each process gets only its own."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.settings.descriptors import new_memory
from kvstore.settings.keys import JobKeys

_SEALS = 0x000F  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE
_F_ADD_SEALS = 1033


class Certificates:
    """A random CURVE key pair for each process of a job."""

    def __init__(self, workers: int, servers: int) -> None:
        import zmq

        parts = [("scheduler", 0)]
        parts += [("server", rank) for rank in range(servers)]
        parts += [("worker", rank) for rank in range(workers)]
        self._pairs: dict[tuple[str, int], tuple[bytes, bytes]] = {
            part: zmq.curve_keypair() for part in parts
        }
        publics = {part: pair[0] for part, pair in self._pairs.items()}
        self._servers = tuple(publics["server", rank] for rank in range(servers))
        self._allowed = tuple(publics.values())

    def of(self, role: str, rank: int) -> JobKeys:
        """Return the keys of one process: its own pair, and the public keys of the others."""
        public, secret = self._pairs[role, rank]
        return JobKeys(public, secret, self._pairs["scheduler", 0][0], self._servers, self._allowed)

    def save(self, folder: Path) -> list[Path]:
        """Write one file for each process, readable only by its owner; return the paths.

        ConfigError is raised if a file already exists, or cannot be written.
        """
        paths = []
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for role, rank in self._pairs:
                paths.append(folder / file_of(role, rank))
                _write_file(paths[-1], self.of(role, rank))
        except FileExistsError as error:
            raise ConfigError(
                f"{error.filename} already exists, and keys are not overwritten: remove it first"
            ) from error
        except OSError as error:
            raise ConfigError(f"keys cannot be written to {error.filename}: {error.strerror}") from error
        return paths


def file_of(role: str, rank: int) -> str:
    """Return the name of the file with the keys of a process."""
    return "scheduler.json" if role == "scheduler" else f"{role}-{rank}.json"


def write_to_memory(keys: JobKeys) -> int:
    """Write keys to memory without a name; return a descriptor that one process inherits."""
    descriptor = new_memory("kvstore-keys")
    os.write(descriptor, keys.to_json())
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
    return descriptor


def _write_file(path: Path, keys: JobKeys) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(keys.to_json())
