"""Where the ranks of another launcher find the scheduler: at a name, an address, or in a folder all can see.

Nothing is sent: a launcher tells its ranks who they are, and seldom where the others are.
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
from kvstore.settings.launchers import Placement
from kvstore.waiting import WaitClock

from .certificates import Certificates, file_of
from .child_process import ProcessRole

#: Ports below those that Linux gives to connections.
_FIRST_PORT, _PORTS = 20_000, 10_000
_PATIENCE = 120.0  # seconds until the folder must hold the address: network file systems take their time
_LOOK = 0.05
_ADDRESS = "address"


@dataclass(frozen=True)
class Rendezvous:
    """What the ranks of a job agree on.

    Attributes
    ----------
    job : str
        Name of the job.
    scheduler : str
        Its address; its port is 0 where `folder` will tell it.
    keys : Path or None
        Folder with a file of keys for each process.
    folder : Path or None
        Where the first rank leaves the keys and the address.
    insecure : bool
        There are no keys, and that is wanted.
    """

    job: str
    scheduler: str
    keys: Path | None = None
    folder: Path | None = None
    insecure: bool = False

    def variables(self, part: ProcessRole) -> dict[str, str]:
        """Make the variables that lead a process to the others."""
        found = {"KVSTORE_JOB": self.job, "KVSTORE_SCHEDULER": self.scheduler}
        if self.keys is not None:
            found["KVSTORE_KEYS_FILE"] = str(self.keys / file_of(part.role, part.rank))
        if self.insecure:
            found["KVSTORE_INSECURE"] = "1"
        return found

    def prepare(self, workers: int, servers: int) -> Callable[[], None]:
        """Make the folder and the keys, as the first rank; what is returned removes all that was made.

        Raises
        ------
        ConfigError
            The folder of a job of this name is there already, or cannot be made.
        """
        with contextlib.ExitStack() as made:
            if self.folder is not None:
                if _created(self.folder.parent):
                    made.callback(_remove_empty, self.folder.parent)
                if not _created(self.folder):
                    raise ConfigError(
                        f"{self.folder} already exists: a job of this name is running, or was killed; remove "
                        "the folder, or set KVSTORE_JOB to a new text in all ranks"
                    )
                made.callback(shutil.rmtree, self.folder, ignore_errors=True)
                Certificates(workers, servers).save(self.folder)
            return made.pop_all().close

    def tell(self, address: str) -> None:
        """Write the address for the other ranks."""
        if self.folder is not None:
            part = self.folder / f"{_ADDRESS}.part"
            part.write_text(address)
            part.rename(self.folder / _ADDRESS)

    def told(self) -> str:
        """Wait for the address, as any other rank.

        Raises
        ------
        TimeoutError
            The first rank has not written it.
        """
        if self.folder is None:
            return self.scheduler
        clock = WaitClock(_PATIENCE)
        while not clock.over:
            clock.read()
            with contextlib.suppress(OSError):
                return (self.folder / _ADDRESS).read_text()
            time.sleep(_LOOK)
        raise TimeoutError(
            f"rank 0 has not written the address of the scheduler to {self.folder} within {_PATIENCE:g} s: "
            "check that the folder of --meet is the same on all hosts"
        )


def meeting(
    place: Placement,
    environment: Mapping[str, str],
    scheduler: str | None = None,
    folder: str | None = None,
    keys: str | None = None,
    insecure: bool = False,
) -> Rendezvous:
    """Find where the ranks of a job meet.

    On one machine at a unix socket that has the name of the job, and no file. On several at the address that
    the user gives; in the folder, whose first rank makes keys too; or under Slurm on its first host, at a
    port that follows from the job.

    Raises
    ------
    ConfigError
        There are several machines and none of these, nothing is said of keys, or the folder can be no folder.
    """
    if scheduler is not None and folder is not None:
        raise ConfigError("--scheduler and --meet contradict each other: give one of them")
    if folder is not None:
        if keys is not None:
            raise ConfigError(
                "--keys and --meet contradict each other: with --meet, rank 0 creates the keys in the folder"
            )
        _check_above(Path(folder).absolute())
        own = Path(folder).absolute() / f"kvstore-{_hashed(place.job)[:16]}"
        return Rendezvous(place.job, addresses.tcp(_host(environment), 0), own, own)
    if scheduler is None and place.local_size == place.size:
        return Rendezvous(place.job, f"ipc://@kvstore/{_hashed(place.job)[:32]}/scheduler")
    address = scheduler or _of_slurm(place, environment)
    addresses.check("--scheduler", address)
    if not addresses.split(address)[1]:
        raise ConfigError(f"--scheduler {address} has no port: add one, so that all ranks know it")
    folder_of_keys = Path(keys).absolute() if keys is not None else None
    found = Rendezvous(place.job, address, folder_of_keys, insecure=insecure)
    if not (folder_of_keys or insecure or _only_here(address)):
        raise ConfigError(
            f"ranks would connect to {address} without encryption, and any machine could connect: give "
            f"--meet "
            "with a folder that all hosts can read, or --keys with a folder of `kvstore keys`; or use "
            "--insecure if you trust all machines in the network"
        )
    return found


def first_node(text: str) -> str:
    """Name the first host of a list such as ``n[07-12,20],m3``, as Slurm writes it.

    Raises
    ------
    ConfigError
        It is no such list.
    """
    match = re.match(r"(?:[^\s,\[\]]|\[[0-9][0-9,-]*\])+", text)
    if match is None or not re.fullmatch(r",.*|", text[match.end() :]):
        raise ConfigError(
            f"SLURM_STEP_NODELIST={text!r} is not a list such as n[07-12,20]: set it as srun does"
        )
    return re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", match[0])


def _check_above(folder: Path) -> None:
    """Refuse what is no folder and what looks misspelt: the first rank makes a folder, but none above it."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--meet {folder} is not a folder")
    if not folder.parent.is_dir():
        raise ConfigError(
            f"--meet {folder}: there is no folder {folder.parent}; name a folder that all hosts can read, or "
            f"a "
            "new folder in it"
        )


def _created(folder: Path) -> bool:
    """Make a folder that only its owner can read; False if it is there."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"--meet: {folder} cannot be created: {error.strerror}") from error
    return True


def _remove_empty(folder: Path) -> None:
    """Remove a folder, unless another job meets in it."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _of_slurm(place: Placement, environment: Mapping[str, str]) -> str:
    if place.launcher != "slurm":
        raise ConfigError(
            f"{place.launcher} has started ranks on several hosts and does not name the first host: give "
            "--meet with a folder that all hosts can read, or --scheduler tcp://HOST:PORT on the host of "
            "rank 0"
        )
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    port = _FIRST_PORT + int(_hashed(place.job)[:8], 16) % _PORTS
    return addresses.tcp(first_node(nodes), port)


def _host(environment: Mapping[str, str]) -> str:
    """Address at which other hosts find a scheduler of this machine."""
    if told := first_set(environment, SETTINGS["host"].names()):
        return environment[told]
    prefix = environment.get("DMLC_INTERFACE", "")
    found = {name: one for name, one in addresses.interfaces().items() if name.startswith(prefix)}
    outward = [one for one in found.values() if prefix or not addresses.is_loopback(one)]
    return outward[0] if outward else addresses.loopback()


def _only_here(address: str) -> bool:
    """Whether no other machine reaches an address."""
    if address.startswith("ipc://"):
        return True
    number = addresses.resolved(addresses.split(address)[0].strip("[]"))
    return number is not None and addresses.is_loopback(number)


def _hashed(job: str) -> str:
    """Make of the name of a job a short one, which no other user's job has."""
    return hashlib.sha256(f"{os.getuid()}:{job}".encode()).hexdigest()
