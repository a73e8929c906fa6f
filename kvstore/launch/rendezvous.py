"""Where the ranks of another launcher find the scheduler: a socket name, an address, or a shared folder.

The ranks exchange no messages for it: a launcher gives them their ranks, and often no address of the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError, TimeoutError
from kvstore.settings import addresses
from kvstore.settings.definitions import SETTINGS
from kvstore.settings.environment import first_set
from kvstore.settings.launchers import WorkerPlacement
from kvstore.waiting import WaitClock

from .certificates import Certificates, file_of
from .child_process import ProcessRole

#: Ports below those that Linux gives to connections.
_FIRST_PORT, _PORTS = 20_000, 10_000
_PATIENCE = 120.0  # seconds until the folder must have the address: network file systems are slow
_LOOK = 0.05
_ADDRESS = "address"


@dataclass(frozen=True)
class Rendezvous:
    """What all ranks of a job know before they start.

    `scheduler` is an address; its port is 0 if the first rank writes the address, and the keys, to `folder`.
    `keys` is a folder with one file of keys for each process. `insecure`: the user wants no encryption.
    """

    job: str
    scheduler: str
    keys: Path | None = None
    folder: Path | None = None
    insecure: bool = False

    def variables(self, part: ProcessRole) -> dict[str, str]:
        """Return the variables with which a process finds the others."""
        found = {"KVSTORE_JOB": self.job, "KVSTORE_SCHEDULER": self.scheduler}
        if self.keys is not None:
            found["KVSTORE_KEYS_FILE"] = str(self.keys / file_of(part.role, part.rank))
        if self.insecure:
            found["KVSTORE_INSECURE"] = "1"
        return found

    def prepare(self, workers: int, servers: int) -> Callable[[], None]:
        """Create the folder and the keys, on the first rank; return a function that removes them.

        ConfigError is raised if the folder of a job of this name already exists, or cannot be created.
        """
        with contextlib.ExitStack() as created:
            if self.folder is not None:
                if _create_folder(self.folder.parent):
                    created.callback(_remove_empty, self.folder.parent)
                if not _create_folder(self.folder):
                    raise ConfigError(
                        f"{self.folder} already exists: a job of this name is running, or was killed; remove "
                        "the folder, or set KVSTORE_JOB to a new text in all ranks"
                    )
                created.callback(shutil.rmtree, self.folder, ignore_errors=True)
                Certificates(workers, servers).save(self.folder)
            return created.pop_all().close

    def write_address(self, address: str) -> None:
        """Write the address for the other ranks."""
        if self.folder is not None:
            part = self.folder / f"{_ADDRESS}.part"
            part.write_text(address)
            part.rename(self.folder / _ADDRESS)

    def wait_for_address(self) -> str:
        """Wait for the address that the first rank writes; raise TimeoutError if it does not."""
        if self.folder is None:
            return self.scheduler
        clock = WaitClock(_PATIENCE)
        while not clock.is_over:
            clock.read()
            with contextlib.suppress(OSError):
                return (self.folder / _ADDRESS).read_text()
            time.sleep(_LOOK)
        raise TimeoutError(
            f"rank 0 has not written the address of the scheduler to {self.folder} within {_PATIENCE:g} s: "
            "check that the folder of --meet is the same on all hosts"
        )


def meeting(
    place: WorkerPlacement,
    environment: Mapping[str, str],
    scheduler: str | None = None,
    folder: str | None = None,
    keys: str | None = None,
    insecure: bool = False,
) -> Rendezvous:
    """Return where the ranks of a job find the scheduler.

    On one host it is a unix socket without a file. On several hosts it is the given address; or the folder;
    or, under Slurm, the first host, at a port that is computed from the name of the job. ConfigError is
    raised if none of these is given, there are no keys, or the folder cannot be one.
    """
    if scheduler is not None and folder is not None:
        raise ConfigError("--scheduler and --meet contradict each other: give one of them")
    if folder is not None:
        if keys is not None:
            raise ConfigError(
                "--keys and --meet contradict each other: with --meet, rank 0 creates the keys in the folder"
            )
        above = Path(folder).absolute()
        _check_folder(above)
        own = above / f"kvstore-{_job_digest(place.job)[:16]}"
        return Rendezvous(place.job, addresses.tcp_address(_own_address(environment), 0), own, own)
    if scheduler is None and place.local_size == place.size:
        return Rendezvous(place.job, f"ipc://@kvstore/{_job_digest(place.job)[:32]}/scheduler")
    address = scheduler or _slurm_address(place, environment)
    addresses.check_address("--scheduler", address)
    if not addresses.split_address(address)[1]:
        raise ConfigError(f"--scheduler {address} has no port: add one, so that all ranks know it")
    if not (keys is not None or insecure or _is_local(address)):
        raise ConfigError(
            f"ranks would connect to {address} without encryption, and any machine could connect: give "
            "--meet with a folder that all hosts can read, or --keys with a folder of `kvstore keys`; or use "
            "--insecure if you trust all machines in the network"
        )
    folder_of_keys = Path(keys).absolute() if keys is not None else None
    return Rendezvous(place.job, address, folder_of_keys, insecure=insecure)


def first_node(text: str) -> str:
    """Return the first host of a list of Slurm, as ``n[07-12,20],m3``; ConfigError: it is no such list."""
    match = re.match(r"(?:[^\s,\[\]]|\[[0-9][0-9,-]*\])+", text)
    if match is None or not re.fullmatch(r",.*|", text[match.end() :]):
        raise ConfigError(
            f"SLURM_STEP_NODELIST={text!r} is not a list such as n[07-12,20]: set it as srun does"
        )
    return re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", match[0])


def _check_folder(folder: Path) -> None:
    """Refuse a path that is probably misspelt: rank 0 creates the folder, but not the one above it."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--meet {folder} is not a folder")
    if not folder.parent.is_dir():
        raise ConfigError(
            f"--meet {folder}: there is no folder {folder.parent}; name a folder that all hosts can read, or "
            "a new folder in it"
        )


def _create_folder(folder: Path) -> bool:
    """Create a folder that only its owner can read; return False if it exists."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"--meet: {folder} cannot be created: {error.strerror}") from error
    return True


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another job uses it
        folder.rmdir()


def _slurm_address(place: WorkerPlacement, environment: Mapping[str, str]) -> str:
    if place.launcher != "slurm":
        raise ConfigError(
            f"{place.launcher} has started ranks on several hosts and does not name the first host: give "
            "--meet with a folder that all hosts can read, or --scheduler tcp://HOST:PORT on the host of "
            "rank 0"
        )
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    port = _FIRST_PORT + int(_job_digest(place.job)[:8], 16) % _PORTS
    return addresses.tcp_address(first_node(nodes), port)


def _own_address(environment: Mapping[str, str]) -> str:
    """Return the address at which other hosts find a scheduler of this host."""
    if variable := first_set(environment, SETTINGS["host"].names()):
        return environment[variable]
    return addresses.outward_address(environment.get("DMLC_INTERFACE", ""))


def _is_local(address: str) -> bool:
    """Return whether only processes of this host can connect to an address."""
    if address.startswith("ipc://"):
        return True
    number = addresses.resolve_host(addresses.split_address(address)[0].strip("[]"))
    return number is not None and addresses.is_loopback(number)


def _job_digest(job: str) -> str:
    """Return a text for the name of a job that differs between users."""
    return hashlib.sha256(f"{os.getuid()}:{job}".encode()).hexdigest()
