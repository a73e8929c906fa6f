"""Rank of this process, size and name of its job, from the variables that launchers set.

Each launcher has one class, which decides whether its variables count and how they name the job.
`kvstore.settings.definitions` lists the variables, as recorded from torchrun 2.x, Open MPI 5 (4 and older:
their documentation), MPICH 5, Intel MPI 2021 and horovodrun 0.28; for Slurm, from its manual.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from ..errors import ConfigError
from .definitions import LAUNCHERS, LauncherRow
from .environment import first_set, process_variables

#: The lowest number of the steps that Slurm itself starts (batch script, interactive shell, extern).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class WorkerPlacement:
    """The place of this process in its job.

    Attributes
    ----------
    launcher : str
        Launcher of the job: ``"kvstore"``, ``"torchrun"``, ``"openmpi"``, ``"mpich"``, ``"horovodrun"``,
        ``"slurm"``, or ``"none"`` for a process without a launcher.
    job : str
        Name of the job: the same text in all its processes, and in no other job that runs at the same time.
    rank, size : int
        Number of this process, from 0, and number of processes of the job.
    local_rank, local_size : int
        The same among the processes of this machine.
    """

    launcher: str
    job: str
    rank: int
    size: int
    local_rank: int
    local_size: int


class PlacementError(ConfigError):
    """Variables of a launcher are wrong; `without_values` is the message for a report that is published."""

    without_values = ""


class _LauncherVariables:
    """The variables of one launcher."""

    def __init__(self, row: LauncherRow) -> None:
        self.row = row

    def has_started(self, env: Mapping[str, str]) -> bool:
        """Return whether this launcher has started the process: whether its variables are set."""
        return any(env.get(sign) for sign in self.row.signs)

    def read_placement(self, env: Mapping[str, str]) -> WorkerPlacement:
        """Return the placement that the variables give.

        Raises
        ------
        ConfigError
            A variable is missing, is no number, or contradicts another.
        """
        size, rank = self._first_number(env, self.row.size), self._first_number(env, self.row.rank)
        local_size = self._local_size(env)
        local_rank = self._first_number(env, self.row.local_rank)
        for number, count in ((rank, size), (local_rank, local_size)):
            if number[1] >= count[1]:
                raise _contradiction_error(number, count, "ranks go from 0 to the size less one")
        if local_size[1] > size[1]:
            raise _contradiction_error(local_size, size, "the job is smaller than its part on this machine")
        job = env.get("KVSTORE_JOB") or self._job_name(env, size[1] == local_size[1])
        return WorkerPlacement(self.row.name, job, rank[1], size[1], local_rank[1], local_size[1])

    def _job_name(self, env: Mapping[str, str], alone: bool) -> str:
        """Return the name of the job; `alone` if all of its processes are on this machine."""
        raise NotImplementedError

    def _local_size(self, env: Mapping[str, str]) -> tuple[str, int]:
        return self._first_number(env, self.row.local_size)

    def _first_number(self, env: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, int]:
        """Return the name and the value of the first variable that is set."""
        found = first_set(env, names)
        if found is None:
            present = next(sign for sign in self.row.signs if env.get(sign))
            text = f"{{0}} is set and {' or '.join(names)} is not: set it as {self.row.name} does"
            raise _placement_error(f"{text}, or unset {{0}}", (present, env[present]))
        if not re.fullmatch(r"[0-9]{1,10}", env[found]):
            raise _placement_error(
                "{0} is not an integer of at least 0: correct or unset it", (found, repr(env[found]))
            )
        return found, int(env[found])


class _OwnLauncher(_LauncherVariables):
    """``kvstore run`` and ``kvstore.spawn``."""

    def _job_name(self, env: Mapping[str, str], alone: bool) -> str:
        raise ConfigError(
            "KVSTORE_RANK and KVSTORE_SIZE are set and KVSTORE_JOB is not: set it to a text that is the same "
            "in all processes of the job and new for each job"
        )


class _TorchrunLauncher(_LauncherVariables):
    """torchrun, and other launchers that set the variables of torch.

    TORCHELASTIC_RUN_ID is ``none`` unless the user has set one. On one machine the folder of
    TORCHELASTIC_ERROR_FILE, which has a random name, distinguishes jobs, and attempts of a job. On several
    machines neither the folder nor TORCHELASTIC_RESTART_COUNT is the same in all processes, so there the
    rendezvous and the address of the master name the job.
    """

    def _job_name(self, env: Mapping[str, str], alone: bool) -> str:
        parts = [env.get(name, "") for name in self.row.job]
        if not any(parts[:3]):
            raise ConfigError(
                "RANK and WORLD_SIZE are set, but no variable names the job: set TORCHELASTIC_RUN_ID, "
                "MASTER_ADDR and MASTER_PORT as torchrun does, or KVSTORE_JOB"
            )
        if alone:
            folder = PurePath(env.get("TORCHELASTIC_ERROR_FILE", "")).parts[:-2]  # without rank and file
            parts += [env.get("TORCHELASTIC_RESTART_COUNT", "0"), "/".join(folder[-3:])]
        return ":".join(["torchrun", *parts])


class _OpenMpi(_LauncherVariables):
    """Open MPI, whose namespace contains host and pid of mpirun; spawned processes have another namespace."""

    def _job_name(self, env: Mapping[str, str], alone: bool) -> str:
        if found := first_set(env, self.row.job):
            return f"openmpi:{env[found]}"
        raise _nameless_error("OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "mpirun -x KVSTORE_JOB=...")


class _MpichLauncher(_LauncherVariables):
    """Hydra, the launcher of MPICH and Intel MPI, and Cray's PALS.

    Intel MPI and PALS name the job. MPICH sets no variable that differs between two jobs. On one machine all
    processes are children of one proxy, so the pid of the proxy names the job: it is unique while the job
    runs.
    """

    def has_started(self, env: Mapping[str, str]) -> bool:
        """Return whether this launcher has started the process: ``srun --mpi=pmi2`` sets PMI_RANK too."""
        if _LAUNCHERS["slurm"].has_started(env) and not first_set(env, self.row.local_rank):
            return False
        return super().has_started(env)

    def _job_name(self, env: Mapping[str, str], alone: bool) -> str:
        if found := first_set(env, self.row.job):
            return f"mpich:{env[found]}"
        if alone:
            return f"mpich:parent-{os.getppid()}"
        raise _nameless_error("PMI_RANK", "I_MPI_HYDRA_UUID", "mpiexec -genv KVSTORE_JOB ...")


class _HorovodLauncher(_LauncherVariables):
    """horovodrun with Gloo; with ``--mpi`` MPI sets the variables. Ray and Spark set the same ones.

    The launcher runs the rendezvous server, so no other job has its address at the same time.
    """

    def _job_name(self, env: Mapping[str, str], alone: bool) -> str:
        address, port = (env.get(name) for name in self.row.job)
        if address and port:
            return f"horovodrun:{address}:{port}"
        raise _nameless_error("HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "KVSTORE_JOB=... horovodrun")


class _SlurmLauncher(_LauncherVariables):
    """A step that srun has started.

    The shell of salloc and the script of sbatch have SLURM_PROCID too, as one process for the whole
    allocation. They have no SLURM_STEP_ID, or one of the numbers that Slurm reserves for its own steps.
    """

    def has_started(self, env: Mapping[str, str]) -> bool:
        return super().has_started(env) and self._first_number(env, self.row.signs)[1] < _FIRST_SPECIAL_STEP

    def _job_name(self, env: Mapping[str, str], alone: bool) -> str:
        if not env.get("SLURM_JOB_ID"):
            raise _nameless_error("SLURM_STEP_ID", "SLURM_JOB_ID", "srun --export=ALL,KVSTORE_JOB=...")
        again = env.get("SLURM_RESTART_COUNT", "0")  # a job that is queued again keeps its number
        return f"slurm:{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}.{again}"

    def _local_size(self, env: Mapping[str, str]) -> tuple[str, int]:
        """Return the number of tasks on this node, from a list such as ``4(x2),1`` of all nodes."""
        name = first_set(env, self.row.local_size) or self.row.local_size[0]
        text = env.get(name, "")
        if re.fullmatch(r"[0-9]+", text):
            return self._first_number(env, (name,))
        node = self._first_number(env, ("SLURM_NODEID",))[1]
        for count, nodes in _task_counts(name, text):
            if node < nodes:
                return name, count
            node -= nodes
        raise _placement_error(
            "{0} has no entry for {1}: correct it", (name, repr(text)), ("SLURM_NODEID", env["SLURM_NODEID"])
        )


_KINDS: dict[str, type[_LauncherVariables]] = {
    "kvstore": _OwnLauncher,
    "torchrun": _TorchrunLauncher,
    "openmpi": _OpenMpi,
    "mpich": _MpichLauncher,
    "horovodrun": _HorovodLauncher,
    "slurm": _SlurmLauncher,
}
_LAUNCHERS = {row.name: _KINDS[row.name](row) for row in LAUNCHERS}


def detect_placement(environment: Mapping[str, str] | None = None) -> WorkerPlacement:
    """Return the place of this process in its job. Reads variables only; opens no file and sends nothing.

    The first launcher whose variables are set counts, in this order: ``kvstore run`` and `kvstore.spawn`,
    torchrun, Open MPI, MPICH or Intel MPI, horovodrun, Slurm's srun. KVSTORE_JOB, if set, names the job under
    any launcher.

    Parameters
    ----------
    environment : mapping, optional
        The variables; those of this process where None.

    Returns
    -------
    Placement
        Rank 0 of 1 with launcher ``"none"`` if no launcher is found.

    Raises
    ------
    ConfigError
        The launcher's variables are incomplete, contradict each other, or do not name the job.
    """
    env = process_variables() if environment is None else environment
    for launcher in _LAUNCHERS.values():
        if launcher.has_started(env):
            return launcher.read_placement(env)
    # A process without a launcher has a job name too, so that two such processes are not one job.
    job = env.get("KVSTORE_JOB") or f"none:{os.getpid()}"
    return WorkerPlacement("none", job, 0, 1, 0, 1)


def _task_counts(name: str, text: str) -> Iterator[tuple[int, int]]:
    """Yield each number of tasks, with the number of consecutive nodes that have it."""
    for entry in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", entry)
        if match is None:
            raise _placement_error(
                "{0} is not a list such as 4(x2),1: set it as srun does", (name, repr(text))
            )
        yield int(match[1]), int(match[2] or 1)


def _placement_error(template: str, *variables: tuple[str, object]) -> PlacementError:
    """Return the error with a name and a value, or a name alone, for each field of the template."""
    error = PlacementError(template.format(*(f"{name}={value}" for name, value in variables)))
    error.without_values = template.format(*(name for name, _ in variables))
    return error


def _contradiction_error(first: tuple[str, int], other: tuple[str, int], rule: str) -> ConfigError:
    return _placement_error(
        f"{{0}} contradicts {{1}}: {rule}; unset the variables of an earlier launcher", first, other
    )


def _nameless_error(sign: str, name: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{sign} is set, but no variable names the job ({name}): give each job a new text with `{remedy}`"
    )
