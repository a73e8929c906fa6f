"""Every setting once: its variable, who else says the same, its default, who reads it, what it means.

Dataclasses and keywords take their defaults from here, and docs/reference/settings.md is made of it
(`kvstore.settings.page`). What reads variables is `kvstore.settings.variables`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

WORKER, SERVER, SCHEDULER, LAUNCHER = "worker", "server", "scheduler", "launcher"
TESTS, BENCH = "tests", "bench"
_ROLES = (WORKER, SERVER, SCHEDULER)


class Alias(NamedTuple):
    """A variable that says the same as another.

    `only` is the role that heeds it, where not all do that heed the other; `unit` the unit of its number,
    where that is another.
    """

    variable: str
    only: str = ""
    unit: str = ""


class SettingRow(NamedTuple):
    """One setting.

    Attributes
    ----------
    name : str
        Of the field that holds it; where `keyword` is set also the keyword of `kvstore.create`.
    variable : str
        Empty where it is a keyword only.
    kind : type
        What the text of the variable is made.
    default : object
        None where there is none, or it follows from something else.
    readers : tuple of str
        The roles and tools that read the variable.
    meaning : str
        One line for people, with the unit.
    aliases : tuple of Alias
        They count in this order, where the variable is not set.
    keyword : bool
        Whether `kvstore.create` takes it.
    """

    name: str
    variable: str
    kind: type
    default: Any
    readers: tuple[str, ...]
    meaning: str
    aliases: tuple[Alias, ...] = ()
    keyword: bool = False

    def names(self, reader: str = "") -> tuple[str, ...]:
        """List the variables that say it, the one that counts most first; `reader` is the role that asks."""
        heeded = (alias.variable for alias in self.aliases if alias.only in ("", reader))
        return (self.variable, *heeded) if self.variable else ()


class LauncherRow(NamedTuple):
    """The variables of one launcher, which are read to learn the place of a process and for nothing else.

    Any one of `signs` says that it was at work. Of several variables for one thing the first that is set
    counts. `job` are those that name the job, and `naming` says how.
    """

    name: str
    title: str
    signs: tuple[str, ...]
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...]
    naming: str
    more: tuple[str, ...] = ()


#: Bytes of a slice where `slice_bytes` is 0: below, messages cost more; above, page faults do.
USUAL_SLICE_BYTES: Final = 1 << 20

STORES: Final = (
    SettingRow("timeout", "KVSTORE_TIMEOUT", float, 300.0, (*_ROLES, LAUNCHER),
        "seconds after which any wait ends with an error", keyword=True),
    SettingRow("threads", "KVSTORE_NUM_THREADS", int, 0, (WORKER, SERVER),
        "threads for large work in this process; 0: the cores that it may use",
        (Alias("MXNET_KVSTORE_REDUCTION_NTHREADS", only=WORKER),), keyword=True),
    SettingRow("group", "", str, "default", (WORKER,),
        "stores of one job are paired by this name and by the order of their creation", keyword=True),
    SettingRow("processes", "", int, 0, (WORKER,),
        "1 keeps a `local` store in this process, also under a launcher, and says of any store that it may "
        "have fewer workers than the launcher has started; 0 leaves it to the launcher", keyword=True),
    SettingRow("on_peer_loss", "", str, "raise", (WORKER,),
        "`\"raise\"` or `\"continue\"`: what the survivors of a lost worker do", keyword=True),
    SettingRow("spin", "KVSTORE_SPIN", float, 50e-6, (WORKER,),
        "seconds that a wait for other processes spins before it sleeps", keyword=True),
    SettingRow("slice_bytes", "KVSTORE_SLICE_BYTES", int, 0, (WORKER,),
        "stores on servers: bytes of the slices into which large keys are cut; 0: 1 MB, for `p3` what "
        "`MXNET_KVSTORE_SLICE_THRESHOLD` says", keyword=True),
    SettingRow("credit_bytes", "KVSTORE_CREDIT_BYTES", int, 32 << 20, (WORKER,),
        "stores on servers: bytes on their way to a server before the rest waits, and may be overtaken",
        keyword=True),
    SettingRow("same_host_shm", "KVSTORE_SAME_HOST_SHM", bool, True, (WORKER,),
        "stores on servers: payloads for servers on this machine go through shared memory", keyword=True),
    SettingRow("cuda_ipc", "KVSTORE_CUDA_IPC", int, 1, (WORKER,),
        "0: arrays on GPUs go between the processes of `shared` through host memory, 1: by CUDA IPC where "
        "that works", keyword=True),
    SettingRow("van", "DMLC_PS_VAN_TYPE", str, "zmq", (WORKER,),
        "`p3` makes `dist_sync` `p3`; other vans than that and `zmq` raise"),
    SettingRow("slice_elements", "MXNET_KVSTORE_SLICE_THRESHOLD", int, 40_000, (WORKER,),
        "`p3`: elements of four bytes in a slice, where `slice_bytes` is 0"),
    SettingRow("gpu_p2p", "MXNET_ENABLE_GPU_P2P", int, 1, (WORKER,),
        "0 keeps `device` from reading one GPU's memory by another"),
    SettingRow("update_on_kvstore", "MXNET_UPDATE_ON_KVSTORE", int, 1, (WORKER,),
        "0: `Trainer` updates, not the store, where nobody says otherwise"),
    SettingRow("cuda_kernels", "KVSTORE_CUDA_KERNELS", str, None, (WORKER,),
        "folder of CUDA kernels that were compiled ahead"),
    SettingRow("cache", "XDG_CACHE_HOME", str, "~/.cache", (WORKER,),
        "folder above the one in which compiled CUDA kernels are kept"),
)  # fmt: skip

SERVERS: Final = (
    SettingRow("heartbeat", "KVSTORE_HEARTBEAT", float, 0.5, (SCHEDULER,),
        "seconds between two signs of life that the scheduler asks for", (Alias("PS_HEARTBEAT_INTERVAL"),)),
    SettingRow("dead_after", "KVSTORE_DEAD_AFTER", float, 5.0, _ROLES,
        "seconds of silence after which a process is lost; in `shared` always the default",
        (Alias("PS_HEARTBEAT_TIMEOUT"),)),
    SettingRow("resend", "KVSTORE_RESEND", float, 5.0, (WORKER,),
        "seconds after which a request without an answer is sent again",
        (Alias("PS_RESEND_TIMEOUT", unit="milliseconds"),)),
    SettingRow("snapshot", "KVSTORE_SNAPSHOT", str, "", (SERVER,),
        "folder in which servers keep snapshots; none: there are no snapshots"),
    SettingRow("snapshot_interval", "KVSTORE_SNAPSHOT_INTERVAL", float, 30.0, (SERVER,),
        "seconds between two snapshots"),
    SettingRow("server_restarts", "KVSTORE_SERVER_RESTARTS", int, 0, (SCHEDULER,),
        "how many lost servers will come back, in all"),
)  # fmt: skip

PLACE: Final = (
    SettingRow("role", "KVSTORE_ROLE", str, "worker", _ROLES,
        "`worker`, `server` or `scheduler`", (Alias("DMLC_ROLE"),)),
    SettingRow("scheduler", "KVSTORE_SCHEDULER", str, None, _ROLES,
        "address of the scheduler: `tcp://10.0.0.5:4711`, `ipc://@name`"),
    SettingRow("root_host", "DMLC_PS_ROOT_URI", str, None, _ROLES,
        "host of the scheduler, with `DMLC_PS_ROOT_PORT`, in the place of `KVSTORE_SCHEDULER`"),
    SettingRow("root_port", "DMLC_PS_ROOT_PORT", int, None, _ROLES,
        "port of the scheduler, with `DMLC_PS_ROOT_URI`"),
    SettingRow("root_local", "DMLC_LOCAL", bool, False, _ROLES,
        "1: the scheduler named by `DMLC_PS_ROOT_URI` and `DMLC_PS_ROOT_PORT` is at a unix socket"),
    SettingRow("num_workers", "KVSTORE_NUM_WORKERS", int, None, _ROLES,
        "how many workers there are; only the scheduler must know", (Alias("DMLC_NUM_WORKER"),)),
    SettingRow("num_servers", "KVSTORE_NUM_SERVERS", int, None, _ROLES,
        "how many servers there are; only the scheduler must know", (Alias("DMLC_NUM_SERVER"),)),
    SettingRow("worker_rank", "DMLC_WORKER_ID", int, None, (WORKER,),
        "rank of a worker that no launcher has numbered; else in the order in which they come",
        (Alias("DMLC_RANK"),)),
    SettingRow("server_rank", "KVSTORE_SERVER_RANK", int, None, (SERVER,),
        "rank of a server; else that of its keys, or in the order in which they come",
        (Alias("DMLC_SERVER_ID"), Alias("DMLC_RANK"))),
    SettingRow("task", "DMLC_TASK_ID", int, None, (WORKER, SERVER),
        "number among workers and then servers, where nothing else gives the rank"),
    SettingRow("local_rank", "BYTEPS_LOCAL_RANK", int, None, (WORKER,),
        "`nccl`, where `DMLC_*` say who takes part: number of this worker on its machine",
        (Alias("LOCAL_RANK"),)),
    SettingRow("job", "KVSTORE_JOB", str, None, (*_ROLES, LAUNCHER),
        "names the job, whoever has launched it: the same text in all processes, and a new one for each job; "
        "else the launcher's name for it, or the scheduler's address"),
    SettingRow("host", "KVSTORE_HOST", str, None, (*_ROLES, LAUNCHER),
        "address at which this process is reached; else that on the way to the scheduler",
        (Alias("DMLC_NODE_HOST"),)),
    SettingRow("interface", "DMLC_INTERFACE", str, None, (*_ROLES, LAUNCHER),
        "how the name of the network interface begins whose address counts, where `KVSTORE_HOST` is not set"),
    SettingRow("kubernetes", "DMLC_USE_KUBERNETES", bool, False, (SCHEDULER,),
        "1: the scheduler binds to all addresses, where `KVSTORE_HOST` is not set"),
    SettingRow("port", "KVSTORE_PORT", int, 0, (SERVER,),
        "port of a server; 0: a free one. `PORT` counts where `DMLC_ROLE` is set", (Alias("PORT"),)),
    SettingRow("keys_file", "KVSTORE_KEYS_FILE", str, None, _ROLES,
        "file with the keys of this process, as `kvstore keys` makes it"),
    SettingRow("keys_fd", "KVSTORE_KEYS_FD", int, None, _ROLES,
        "the same as a descriptor that a launcher has left open; goes before the file"),
    SettingRow("insecure", "KVSTORE_INSECURE", bool, False, (*_ROLES, LAUNCHER),
        "1: no keys, though other machines can connect"),
    SettingRow("restart", "KVSTORE_RESTART", int, 0, (WORKER, SERVER),
        "how often the launcher has started this process again"),
    SettingRow("master", "KVSTORE_MASTER", str, None, (WORKER,),
        "`nccl` on several machines: where worker 0 listens, as `10.0.0.5:4711`; the same in all processes"),
    SettingRow("ssh", "KVSTORE_SSH", str, "ssh", (LAUNCHER,),
        "what `kvstore run --hosts` starts to reach a host, options included"),
)  # fmt: skip

#: What tests and benches find outside of this tree.
_OUTSIDE: Final = {
    "KVSTORE_TEST_TORCH": "a Python that has PyTorch",
    "KVSTORE_TEST_JAX": "a Python that has JAX and optax",
    "KVSTORE_TEST_RAY": "a Python that has Ray",
    "KVSTORE_TEST_MXNET": "a Python that has MXNet 1.9.1",
    "KVSTORE_TEST_JUPYTER": "a Python that has nbclient and ipykernel",
    "KVSTORE_TEST_OPENMPI": "a Python beside an Open MPI",
    "KVSTORE_TEST_HOROVOD": "a Python that has Horovod",
    "KVSTORE_TEST_HOROVOD_CORE": "folder of a Horovod built for tests",
    "KVSTORE_TEST_CACHE": "folder that keeps what tests have built",
    "KVSTORE_TEST_SSHD": "an sshd that is not in the path",
    "KVSTORE_BENCH_MXNET": "a Python that has MXNet 1.9.1",
    "KVSTORE_BENCH_TORCH": "a Python that has PyTorch",
    "KVSTORE_BENCH_OPENMPI": "a Python beside an Open MPI",
    "KVSTORE_BENCH_MPICH": "a Python beside an MPICH",
    "KVSTORE_BENCH_DEEPSPEED": "a Python that has DeepSpeed",
    "KVSTORE_BENCH_REDIS": "a Python beside a redis-server",
    "KVSTORE_BENCH_RAY": "a Python that has Ray",
}
DEVELOPMENT: Final = (
    SettingRow("sim_seed", "KVSTORE_SIM_SEED", int, None, (TESTS,),
        "seed of the one simulated job to run again"),
    SettingRow("fuzz_seed", "KVSTORE_FUZZ_SEED", int, None, (TESTS,), "seed of random frames that failed"),
    SettingRow("bench_all", "KVSTORE_BENCH_ALL", bool, False, (BENCH,),
        "1: all cases, not those with a goal alone"),
    *(SettingRow(name.removeprefix("KVSTORE_").lower(), name, str, None,
        (TESTS if "_TEST_" in name else BENCH,), meaning)
      for name, meaning in _OUTSIDE.items()),
)  # fmt: skip

#: In the order in which they are asked; the first that has left its variables wins.
LAUNCHERS: Final = (
    LauncherRow(
        "kvstore",
        "`kvstore run`, `kv.spawn`",
        signs=("KVSTORE_RANK", "KVSTORE_SIZE", "KVSTORE_LOCAL_RANK", "KVSTORE_LOCAL_SIZE"),
        rank=("KVSTORE_RANK",),
        size=("KVSTORE_SIZE",),
        local_rank=("KVSTORE_LOCAL_RANK",),
        local_size=("KVSTORE_LOCAL_SIZE",),
        job=("KVSTORE_JOB",),
        naming="128 random bits",
    ),
    LauncherRow(
        "torchrun",
        "torchrun",
        signs=("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        job=("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"),
        naming="all of them; on one machine also the attempt and its folder, which has a random name",
        more=("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"),
    ),
    LauncherRow(
        "openmpi",
        "Open MPI",
        signs=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        naming="the first that is set",
    ),
    LauncherRow(
        "mpich",
        "MPICH, Intel MPI",
        signs=("PMI_RANK", "PMI_SIZE"),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job=("I_MPI_HYDRA_UUID", "PMI_JOBID"),
        naming="the first that is set; MPICH has neither: on one machine the pid of the parent, over several "
        "set `KVSTORE_JOB`",
    ),
    LauncherRow(
        "horovodrun",
        "horovodrun",
        signs=("HOROVOD_RANK", "HOROVOD_SIZE"),
        rank=("HOROVOD_RANK",),
        size=("HOROVOD_SIZE",),
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
        job=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        naming="both; with `--mpi` the variables of MPI are there instead",
    ),
    LauncherRow(
        "slurm",
        "Slurm's srun",
        signs=("SLURM_STEP_ID",),
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        local_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        naming="all of them; without a step of srun the process is on its own",
        more=("SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_NODELIST"),
    ),
)

#: Variables of MXNet that mean nothing here, and why; a store warns of each.
IGNORED: Final = {
    "MXNET_KVSTORE_USETREE": "device sums do not run over trees",
    "MXNET_KVSTORE_LOGTREE": "device sums do not run over trees",
    "MXNET_KVSTORE_TREE_ARRAY_BOUND": "device sums do not run over trees",
    "MXNET_KVSTORE_TREE_BACKTRACK": "device sums do not run over trees",
    "MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY": "device sums do not run over trees",
    "MXNET_KVSTORE_SERIAL_PUSH": "row-sparse sums give the same bits on any number of threads",
    "MXNET_KVSTORE_BIGARRAY_BOUND": "large keys are cut by their bytes, see the option slice_bytes",
    "MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE": "use the logger 'kvstore' instead",
}
#: The same of ps-lite; each process of a job warns of each once, unless it says 0.
IGNORED_ON_SERVERS: Final = {
    "PS_VERBOSE": "use the loggers 'kvstore.ps' and 'kvstore.wire' instead",
    "PS_DROP_MSG": "lost messages are for the tests, which simulate a whole job",
    "PS_RESEND": "what is not answered is always sent again",
    "DMLC_PS_WATER_MARK": "credit limits what is under way",
}

SETTINGS: Final = {row.name: row for rows in (STORES, SERVERS, PLACE, DEVELOPMENT) for row in rows}
DEFAULTS: Final = {name: row.default for name, row in SETTINGS.items()}
