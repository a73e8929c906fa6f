"""All settings, each with its variable, other variables for it, its default, its readers and its meaning.

Dataclasses and keywords take their defaults from this module, and `docs/settings_page.py` generates
docs/reference/settings.md from it. `kvstore.settings.environment` reads the variables.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

WORKER, SERVER, SCHEDULER, LAUNCHER = "worker", "server", "scheduler", "launcher"
TESTS, BENCH = "tests", "bench"
_ROLES = (WORKER, SERVER, SCHEDULER)


class VariableAlias(NamedTuple):
    """Another variable for the same setting.

    `only` is the one role that reads it, if not all readers of the setting do. `unit` is the unit of its
    number, if it differs from that of the setting.
    """

    variable: str
    only: str = ""
    unit: str = ""


class SettingRow(NamedTuple):
    """One setting.

    Attributes
    ----------
    name : str
        The field that holds the value; if `keyword` is True, also the keyword of `kvstore.create`.
    variable : str
        Empty if the setting has only a keyword.
    kind : type
        The text of the variable is converted to this type.
    default : object
        None if there is no default, or if it depends on something else.
    readers : tuple of str
        The roles and tools that read the variable.
    meaning : str
        One line for the page of settings, with the unit.
    aliases : tuple of Alias
        They count in this order, if the variable is not set.
    keyword : bool
        Whether `kvstore.create` takes it.
    """

    name: str
    variable: str
    kind: type
    default: Any
    readers: tuple[str, ...]
    meaning: str
    aliases: tuple[VariableAlias, ...] = ()
    keyword: bool = False

    def names(self, reader: str = "") -> tuple[str, ...]:
        """List the variables of the setting, in order of precedence; `reader` is the role that reads them."""
        heeded = (alias.variable for alias in self.aliases if alias.only in ("", reader))
        return (self.variable, *heeded) if self.variable else ()


class LauncherRow(NamedTuple):
    """The variables of one launcher, which give the rank of a process and the size of its job.

    If any variable of `signs` is set, this launcher has started the process. If several variables have one
    meaning, the first one that is set counts. The variables of `job` name the job; `naming` describes how.
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


#: Bytes of a slice if `slice_bytes` is 0: smaller slices cost more messages, larger ones more page faults.
USUAL_SLICE_BYTES: Final = 1 << 20

#: Prefix of the names of side keys, which a store creates for its own use.
SIDE: Final = "__kvstore__/"


def is_side(key: object) -> bool:
    """Return whether a key is a side key; see `stores.protocol.Backend.side`."""
    return isinstance(key, str) and key.startswith(SIDE)


STORES: Final = (
    SettingRow("timeout", "KVSTORE_TIMEOUT", float, 300.0, (*_ROLES, LAUNCHER),
        "seconds after which any wait ends with an error", keyword=True),
    SettingRow("threads", "KVSTORE_NUM_THREADS", int, 0, (WORKER, SERVER),
        "threads for large arrays in this process; 0: the number of cores that it can use",
        (VariableAlias("MXNET_KVSTORE_REDUCTION_NTHREADS", only=WORKER),), keyword=True),
    SettingRow("group", "", str, "default", (WORKER,),
        "name that pairs the stores of a job, together with the order of their creation", keyword=True),
    SettingRow("processes", "", int, 0, (WORKER,),
        "1: a `local` store stays in this process, also under a launcher, and any store may have fewer "
        "workers "
        "than the launcher has started; 0: the launcher decides", keyword=True),
    SettingRow("on_peer_loss", "", str, "raise", (WORKER,),
        "`\"raise\"` or `\"continue\"`: what the other workers do after a worker is lost", keyword=True),
    SettingRow("spin", "KVSTORE_SPIN", float, 50e-6, (WORKER,),
        "seconds that a wait for other processes spins before it sleeps", keyword=True),
    SettingRow("slice_bytes", "KVSTORE_SLICE_BYTES", int, 0, (WORKER,),
        "stores on servers: bytes of the slices into which large keys are cut; 0: 1 MB, or for `p3` the "
        "value "
        "of `MXNET_KVSTORE_SLICE_THRESHOLD`", keyword=True),
    SettingRow("credit_bytes", "KVSTORE_CREDIT_BYTES", int, 32 << 20, (WORKER,),
        "stores on servers: bytes in flight to one server; further slices wait, in order of priority",
        keyword=True),
    SettingRow("same_host_shm", "KVSTORE_SAME_HOST_SHM", bool, True, (WORKER,),
        "stores on servers: data for servers on this machine goes through shared memory", keyword=True),
    SettingRow("hierarchy", "KVSTORE_HIERARCHY", str, "flat", (WORKER,),
        "stores on servers with rounds: `\"host\"`: the workers of one host sum in shared memory, and one "
        "sum for each host travels; `\"auto\"`: so if more than one host has more than one worker; "
        "`\"flat\"`: each worker sends", keyword=True),
    SettingRow("cuda_ipc", "KVSTORE_CUDA_IPC", int, 1, (WORKER,),
        "how `shared` transfers GPU arrays between processes; 0: through host memory; 1: through CUDA IPC if "
        "that works", keyword=True),
    SettingRow("van", "DMLC_PS_VAN_TYPE", str, "zmq", (WORKER,),
        "`p3` turns `dist_sync` into `p3`; a value other than `p3` and `zmq` raises an error"),
    SettingRow("slice_elements", "MXNET_KVSTORE_SLICE_THRESHOLD", int, 40_000, (WORKER,),
        "`p3`: number of four-byte elements in a slice, if `slice_bytes` is 0"),
    SettingRow("gpu_p2p", "MXNET_ENABLE_GPU_P2P", int, 1, (WORKER,),
        "0: a GPU of `device` does not read the memory of another GPU"),
    SettingRow("update_on_kvstore", "MXNET_UPDATE_ON_KVSTORE", int, 1, (WORKER,),
        "0: `Trainer` updates instead of the store, unless `update_on_kvstore` is given"),
    SettingRow("cuda_kernels", "KVSTORE_CUDA_KERNELS", str, None, (WORKER,),
        "folder with CUDA kernels that were compiled in advance"),
    SettingRow("cache", "XDG_CACHE_HOME", str, "~/.cache", (WORKER,),
        "parent of the folder in which compiled CUDA kernels are kept"),
    SettingRow("log", "KVSTORE_LOG", str, "", (*_ROLES, LAUNCHER),
        "`info` or `debug`: writes the log of the job to stderr; `debug:kvstore.ps,kvstore.shared` only that "
        "of these loggers"),
    SettingRow("metrics", "KVSTORE_METRICS", str, "", _ROLES,
        "metrics for Prometheus: `[HOST]:PORT` (`:9400`), the first free port from there on, at 127.0.0.1 if "
        "no host is named; or a folder, or a file whose name ends with `.prom`, for node_exporter"),
    SettingRow("timeline", "KVSTORE_TIMELINE", str, "", _ROLES,
        "folder to which each process writes a timeline of its last 262,144 events when it ends, and on "
        "SIGUSR1; `kvstore timeline` reads it"),
)  # fmt: skip

SERVERS: Final = (
    SettingRow("heartbeat", "KVSTORE_HEARTBEAT", float, 0.5, (SCHEDULER,),
        "seconds between two heartbeats; the scheduler sends this value to all processes",
        (VariableAlias("PS_HEARTBEAT_INTERVAL"),)),
    SettingRow("dead_after", "KVSTORE_DEAD_AFTER", float, 5.0, _ROLES,
        "seconds without a heartbeat after which a process is lost; `shared` always uses the default",
        (VariableAlias("PS_HEARTBEAT_TIMEOUT"),)),
    SettingRow("resend", "KVSTORE_RESEND", float, 5.0, (WORKER,),
        "seconds after which a request without an answer is sent again",
        (VariableAlias("PS_RESEND_TIMEOUT", unit="milliseconds"),)),
    SettingRow("snapshot", "KVSTORE_SNAPSHOT", str, "", (SERVER,),
        "folder in which servers keep snapshots; if empty, there are no snapshots"),
    SettingRow("snapshot_interval", "KVSTORE_SNAPSHOT_INTERVAL", float, 30.0, (SERVER,),
        "seconds between two snapshots"),
    SettingRow("server_restarts", "KVSTORE_SERVER_RESTARTS", int, 0, (SCHEDULER,),
        "number of restarts of lost servers, of all servers together"),
    SettingRow("journal", "KVSTORE_JOURNAL", str, "", (SCHEDULER,),
        "folder in which the scheduler keeps its journal, so that it can be started again; if empty, its "
        "death ends the job"),
    SettingRow("ports", "KVSTORE_PORTS", str, "", (SERVER, SCHEDULER, LAUNCHER),
        "range of ports, such as `7000-7100`, for scheduler, servers and `MASTER_PORT`, where no other "
        "setting gives a port; if empty, any free port"),
    SettingRow("streams", "KVSTORE_STREAMS", int, 1, (SERVER,),
        "0: data between workers and servers goes over ZeroMQ only; 1: over connections of its own"),
)  # fmt: skip

PLACE: Final = (
    SettingRow("role", "KVSTORE_ROLE", str, "worker", _ROLES,
        "`worker`, `server` or `scheduler`", (VariableAlias("DMLC_ROLE"),)),
    SettingRow("scheduler", "KVSTORE_SCHEDULER", str, None, _ROLES,
        "address of the scheduler: `tcp://10.0.0.5:4711`, `ipc://@name`"),
    SettingRow("root_host", "DMLC_PS_ROOT_URI", str, None, _ROLES,
        "host of the scheduler; together with `DMLC_PS_ROOT_PORT` it replaces `KVSTORE_SCHEDULER`"),
    SettingRow("root_port", "DMLC_PS_ROOT_PORT", int, None, _ROLES,
        "port of the scheduler; needs `DMLC_PS_ROOT_URI`"),
    SettingRow("root_local", "DMLC_LOCAL", bool, False, _ROLES,
        "1: the scheduler of `DMLC_PS_ROOT_URI` and `DMLC_PS_ROOT_PORT` listens at a unix socket"),
    SettingRow("num_workers", "KVSTORE_NUM_WORKERS", int, None, _ROLES,
        "number of workers; required only for the scheduler", (VariableAlias("DMLC_NUM_WORKER"),)),
    SettingRow("num_servers", "KVSTORE_NUM_SERVERS", int, None, _ROLES,
        "number of servers; required only for the scheduler", (VariableAlias("DMLC_NUM_SERVER"),)),
    SettingRow("worker_rank", "DMLC_WORKER_ID", int, None, (WORKER,),
        "rank of a worker without a launcher; if not set, the scheduler assigns ranks in the order of "
        "connection",
        (VariableAlias("DMLC_RANK"),)),
    SettingRow("server_rank", "KVSTORE_SERVER_RANK", int, None, (SERVER,),
        "rank of a server; if not set, the rank in its keys file, or the scheduler assigns ranks in the "
        "order of "
        "connection",
        (VariableAlias("DMLC_SERVER_ID"), VariableAlias("DMLC_RANK"))),
    SettingRow("task", "DMLC_TASK_ID", int, None, (WORKER, SERVER),
        "number of a process, workers first and then servers; used if no other variable gives the rank"),
    SettingRow("local_rank", "BYTEPS_LOCAL_RANK", int, None, (WORKER,),
        "`nccl` in a job with `DMLC_*` variables: number of this worker on its machine",
        (VariableAlias("LOCAL_RANK"),)),
    SettingRow("job", "KVSTORE_JOB", str, None, (*_ROLES, LAUNCHER),
        "name of the job, under any launcher: the same text in all processes, and a new text for each job; "
        "if "
        "not set, the launcher's name for the job, or the address of the scheduler"),
    SettingRow("host", "KVSTORE_HOST", str, None, (*_ROLES, LAUNCHER),
        "address at which other processes reach this process; if not set, the address of the network "
        "interface "
        "towards the scheduler",
        (VariableAlias("DMLC_NODE_HOST"),)),
    SettingRow("interface", "DMLC_INTERFACE", str, None, (*_ROLES, LAUNCHER),
        "beginning of the name of the network interface whose address is used, if `KVSTORE_HOST` is not set"),
    SettingRow("kubernetes", "DMLC_USE_KUBERNETES", bool, False, (SCHEDULER,),
        "1: the scheduler binds to all addresses, if `KVSTORE_HOST` is not set"),
    SettingRow("port", "KVSTORE_PORT", int, 0, (SERVER,),
        "port of a server; 0: a free port. `PORT` is read only if `DMLC_ROLE` is set",
        (VariableAlias("PORT"),)),
    SettingRow("keys_file", "KVSTORE_KEYS_FILE", str, None, _ROLES,
        "file with the keys of this process, written by `kvstore keys`"),
    SettingRow("keys_fd", "KVSTORE_KEYS_FD", int, None, _ROLES,
        "file descriptor with the same keys, which a launcher has opened; takes precedence over the file"),
    SettingRow("insecure", "KVSTORE_INSECURE", bool, False, (*_ROLES, LAUNCHER),
        "1: run without keys, even if other machines can connect"),
    SettingRow("restart", "KVSTORE_RESTART", int, 0, _ROLES,
        "number of times that the launcher has restarted this process"),
    SettingRow("master", "KVSTORE_MASTER", str, None, (WORKER,),
        "`nccl` on several machines: address at which worker 0 listens, such as `10.0.0.5:4711`; the same in "
        "all "
        "processes"),
    SettingRow("ssh", "KVSTORE_SSH", str, "ssh", (LAUNCHER,),
        "command, with options, that `kvstore run --hosts` uses to reach a host"),
)  # fmt: skip

#: Programs outside of this tree that tests and benchmarks use.
_OUTSIDE: Final = {
    "KVSTORE_TEST_TORCH": "a Python that has PyTorch",
    "KVSTORE_TEST_JAX": "a Python that has JAX and optax",
    "KVSTORE_TEST_RAY": "a Python that has Ray",
    "KVSTORE_TEST_MXNET": "a Python that has MXNet 1.9.1",
    "KVSTORE_TEST_JUPYTER": "a Python that has nbclient and ipykernel",
    "KVSTORE_TEST_OPENMPI": "a Python in an environment with Open MPI",
    "KVSTORE_TEST_HOROVOD": "a Python that has Horovod",
    "KVSTORE_TEST_HOROVOD_CORE": "folder of a Horovod that was built for tests",
    "KVSTORE_TEST_CACHE": "folder in which tests keep what they build",
    "KVSTORE_TEST_PROMETHEUS": "folder of prometheus and promtool, if they are not on PATH",
    "KVSTORE_TEST_SSHD": "path of an sshd, if it is not on PATH",
    "KVSTORE_BENCH_MXNET": "a Python that has MXNet 1.9.1",
    "KVSTORE_BENCH_TORCH": "a Python that has PyTorch",
    "KVSTORE_BENCH_OPENMPI": "a Python in an environment with Open MPI",
    "KVSTORE_BENCH_MPICH": "a Python in an environment with MPICH",
    "KVSTORE_BENCH_DEEPSPEED": "a Python that has DeepSpeed",
    "KVSTORE_BENCH_REDIS": "a Python in an environment with redis-server",
    "KVSTORE_BENCH_RAY": "a Python that has Ray",
    "KVSTORE_BENCH_BEFORE": "a Python that has another kvstore: an older one, or one without counters",
}
DEVELOPMENT: Final = (
    SettingRow("sim_seed", "KVSTORE_SIM_SEED", int, None, (TESTS,),
        "seed of the simulated job to repeat"),
    SettingRow("fuzz_seed", "KVSTORE_FUZZ_SEED", int, None, (TESTS,), "seed of the random frames to repeat"),
    SettingRow("test_repeats", "KVSTORE_TEST_REPEATS", int, 1, (TESTS,),
        "number of times that tests of the PyTorch module repeat a program"),
    SettingRow("bench_all", "KVSTORE_BENCH_ALL", bool, False, (BENCH,),
        "1: all cases, also those without a goal"),
    *(SettingRow(name.removeprefix("KVSTORE_").lower(), name, str, None,
        (TESTS if "_TEST_" in name else BENCH,), meaning)
      for name, meaning in _OUTSIDE.items()),
)  # fmt: skip

#: In the order of the search; the first launcher whose variables are set counts.
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
        naming="all of them; on one machine also the number of the attempt and its folder, which has a "
        "random name",
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
        naming="the first that is set; MPICH sets neither: on one machine kvstore uses the pid of the "
        "parent, "
        "on several machines set `KVSTORE_JOB`",
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
        naming="both; with `--mpi` the variables of MPI are set instead",
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
        naming="all of them; outside of an srun step the process is a job of one",
        more=("SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_NODELIST"),
    ),
)

#: Variables of MXNet that have no effect, and why; a store warns of each.
IGNORED: Final = {
    "MXNET_KVSTORE_USETREE": "device sums do not use trees",
    "MXNET_KVSTORE_LOGTREE": "device sums do not use trees",
    "MXNET_KVSTORE_TREE_ARRAY_BOUND": "device sums do not use trees",
    "MXNET_KVSTORE_TREE_BACKTRACK": "device sums do not use trees",
    "MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY": "device sums do not use trees",
    "MXNET_KVSTORE_SERIAL_PUSH": "row-sparse sums give the same bits with any number of threads",
    "MXNET_KVSTORE_BIGARRAY_BOUND": "large keys are cut by bytes; use the option slice_bytes",
    "MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE": "use the logger 'kvstore' instead",
}
#: Variables of ps-lite without effect; each process of a job warns once of each, unless its value is 0.
IGNORED_ON_SERVERS: Final = {
    "PS_VERBOSE": "use the loggers 'kvstore.ps' and 'kvstore.wire' instead",
    "PS_DROP_MSG": "only the tests drop messages, in a simulated job",
    "PS_RESEND": "requests without an answer are always sent again",
    "DMLC_PS_WATER_MARK": "the option credit_bytes limits the bytes in flight",
}

SETTINGS: Final = {row.name: row for rows in (STORES, SERVERS, PLACE, DEVELOPMENT) for row in rows}
DEFAULTS: Final = {name: row.default for name, row in SETTINGS.items()}
