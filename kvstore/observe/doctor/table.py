"""The table of the checks: the name of each, the function that runs it, and what to do after a fault.

A function names the cure itself if it depends on the finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from . import gpus, installation, launchers, machine, network, self_tests
from .checks import DoctorCheck
from .installation import DISTRIBUTION, EXTRAS

# fmt: off
CHECKS = (
    DoctorCheck("Python", installation.python, "use the usual build of Python (python3.13, not python3.13t)"),
    DoctorCheck("kvstore", installation.package,
          f"pip uninstall {DISTRIBUTION}, and install one of them; look at PYTHONPATH too"),
    DoctorCheck("compiled modules", installation.compiled_modules,
          f"pip install --force-reinstall --no-deps {DISTRIBUTION}; in a source tree: pip install -e ."),
    DoctorCheck("instruction set", installation.instruction_set,
          "let the virtual machine have the processor of its host (QEMU: -cpu host)"),
    DoctorCheck("dependencies", installation.dependencies),
    *(DoctorCheck(f"extra {name}", partial(installation.extra, name)) for name in EXTRAS),
    DoctorCheck("frameworks", installation.frameworks),
    DoctorCheck("processors", machine.processors,
          "start it without binding (mpirun --bind-to none, srun --cpu-bind=none, taskset -c 0-N)"),
    DoctorCheck("memory", machine.memory,
          "end other processes, or raise the limit of the container (docker run --memory)"),
    DoctorCheck("memfd", machine.memfd,
          "allow memfd_create and sealing in the seccomp profile; it needs Linux 3.17 or newer"),
    DoctorCheck("shared regions", machine.shared_regions,
          "end the job, start it again from its last checkpoint, and report this as a bug of kvstore"),
    DoctorCheck("shared memory folder", machine.shared_memory_folder,
          "remove the files of dead processes (ls -l /dev/shm), or make it larger "
          "(mount -o remount,size=8G /dev/shm; docker run --shm-size=8g)"),
    DoctorCheck("huge pages", machine.huge_pages,
          "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"),
    DoctorCheck("locked memory", machine.locked_memory,
          "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in a systemd unit"),
    DoctorCheck("open files", machine.open_files),
    DoctorCheck("address space", machine.address_space, "ulimit -v unlimited -f unlimited"),
    DoctorCheck("ptrace", machine.ptrace),
    DoctorCheck("launcher", launchers.launcher),
    DoctorCheck("parameter server", launchers.parameter_server,
          "run `python -c 'from kvstore import roles; roles.find()'`, whose error says what is wrong"),
    DoctorCheck("variables", launchers.variables),
    DoctorCheck("settings", launchers.settings),
    DoctorCheck("MPI", launchers.mpi,
          "start with the mpiexec of the MPI that mpi4py was built for, or "
          "`pip install --force-reinstall --no-binary mpi4py mpi4py` to build it for this mpiexec"),
    DoctorCheck("CUDA", gpus.cuda, "compare with `nvidia-smi`; in a container use `docker run --gpus all`"),
    DoctorCheck("CUDA kernels", gpus.cuda_kernels,
          'python -m kvstore.kernels.cuda build "$KVSTORE_CUDA_KERNELS", or unset the variable'),
    DoctorCheck("NCCL", gpus.nccl,
          f"pip install '{DISTRIBUTION}[nccl]' (with a driver of CUDA 12, nvidia-nccl-cu12)"),
    DoctorCheck("interfaces", network.interfaces),
    DoctorCheck("host name", network.host_name, 'echo "127.0.1.1 $(hostname)" | sudo tee -a /etc/hosts'),
    DoctorCheck("ports", network.ports,
          "bring the interface up (sudo ip link set lo up), or use `kvstore run --transport ipc`"),
    DoctorCheck("encryption", network.encryption,
          "pip install --force-reinstall --only-binary pyzmq pyzmq, whose wheels have libsodium"),
    DoctorCheck("keys file", network.keys_file,
          'create new keys (`kvstore keys`), or at least chmod 600 "$KVSTORE_KEYS_FILE"'),
)
# fmt: on

_BY_ITSELF = 600.0  # seconds: a program in a child process has a deadline of its own
_SUMS_CURE = (
    "fix the errors and warnings above first; if there are none, report this with all lines of this command"
)
_SPEED_CURE = "see the self-tests; `kvstore doctor` without --speed does not need this"

SPEEDS = (
    DoctorCheck("speed of memory", self_tests.speed_of_memory, _SPEED_CURE, _BY_ITSELF),
    DoctorCheck("speed of local", self_tests.speed_of_local, _SPEED_CURE, _BY_ITSELF),
    DoctorCheck("speed of dist_sync", self_tests.speed_of_dist_sync, _SPEED_CURE, _BY_ITSELF),
)


def self_test_checks() -> Iterator[DoctorCheck]:
    """Yield the self-tests of this machine."""
    yield DoctorCheck(
        "reads between processes",
        self_tests.reads_between_processes,
        "see the line on ptrace; in a container use `docker run --cap-add=SYS_PTRACE`",
    )
    for store, (command, workers) in self_tests.commands().items():
        yield DoctorCheck(f"test {store}", partial(self_tests.sums, command, workers), _SUMS_CURE, _BY_ITSELF)
