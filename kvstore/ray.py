"""Stores for Ray: a job whose workers, servers and scheduler are Ray actors.

Ray places the actors, restarts them when they die, and transfers functions and results. Gradients and weights
are sent over the connections of the ``dist`` stores, never through Ray's object store.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import (
    ArgumentError,
    ClosedError,
    ConfigError,
    KVStoreError,
    MissingBackendError,
    PeerLostError,
    TimeoutError,
    WorkerError,
)
from .launch import serve
from .launch.certificates import Certificates, write_to_memory
from .launch.child_process import ProcessRole
from .launch.process import new_job, worker_variables
from .launch.service import variables_of
from .settings import addresses
from .settings.addresses import loopback_address
from .settings.environment import process_variables, set_variables
from .settings.keys import JobKeys

try:
    import ray as _ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as _error:
    raise MissingBackendError(f"kvstore.ray needs Ray: pip install ray; {_error}") from _error

__all__ = ["Job", "Run"]

_LEAVE = 5.0  # seconds after the last worker in which servers and scheduler end by themselves
_FIRST_WORD = 60.0  # seconds in which a scheduler must report its address
_MOMENT = 5.0  # seconds in which a lost process can report its own error
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class Job:
    """Settings of a job. Each run of the job uses them.

    Attributes
    ----------
    num_workers, num_servers : int
        Numbers of worker and server actors. The job also has one scheduler.
    resources_per_worker, resources_per_server : mapping
        Resources of each actor, as in Ray: ``{"CPU": 4, "GPU": 1}``.
    strategy : str
        Placement strategy of Ray: ``"PACK"``, ``"SPREAD"``, ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``.
    worker_restarts, server_restarts : int
        Number of times that each of them is restarted when it dies. A restarted worker calls the function
        again, with KVSTORE_RESTART increased by one. The other workers continue if their stores were created
        with ``on_peer_loss="continue"``.
    snapshot : str
        Folder in which servers save their data, and from which they restart. With several nodes, all nodes
        must be able to read and write it. Servers cannot restart without it.
    snapshot_interval : float or None
        Seconds between two snapshots; None means 30.
    imports : tuple of str
        Modules that servers import. They register optimizers and codecs.
    insecure : bool
        If True, connections between nodes have no keys and no encryption. A job on one node never has keys.
    variables : mapping
        Environment variables of all actors, in addition to those of the job.
    timeout : float
        Seconds that Ray has to find resources for the actors.

    Raises
    ------
    ConfigError
        An argument is not valid, or `server_restarts` is set without `snapshot`.

    Examples
    --------
    >>> def train(rate):
    ...     with kvstore.create("dist_sync") as store:
    ...         ...
    >>> kvstore.ray.Job(num_workers=4, num_servers=2).run(train, 0.1)  # doctest: +SKIP
    """

    num_workers: int
    num_servers: int = 1
    resources_per_worker: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    resources_per_server: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    strategy: str = "PACK"
    worker_restarts: int = 0
    server_restarts: int = 0
    snapshot: str = ""
    snapshot_interval: float | None = None
    imports: tuple[str, ...] = ()
    insecure: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 300.0

    def __post_init__(self) -> None:
        least = {"num_workers": 1, "num_servers": 1, "worker_restarts": 0, "server_restarts": 0}
        for name, number in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < number:
                raise ConfigError(f"{name} must be an integer of at least {number}, got {value!r}")
        for name in ("resources_per_worker", "resources_per_server"):
            _check_resources(name, getattr(self, name))
        if self.strategy not in _STRATEGIES:
            raise ConfigError(f"strategy must be one of {', '.join(_STRATEGIES)}, got {self.strategy!r}")
        self._check_seconds()
        self._check_texts()
        if self.server_restarts and not self.snapshot:
            raise ConfigError("server_restarts needs snapshot: a server restarts from the data that it saved")

    def _check_seconds(self) -> None:
        for name in ("timeout", "snapshot_interval"):
            value = getattr(self, name)
            if name == "snapshot_interval" and value is None:
                continue
            if not _is_amount(value) or value == 0:
                raise ConfigError(f"{name} must be a number of seconds above 0, got {value!r}")

    def _check_texts(self) -> None:
        if not isinstance(self.snapshot, str | os.PathLike):
            raise ConfigError(f"snapshot must be the path of a folder, got {self.snapshot!r}")
        if not isinstance(self.insecure, bool):
            raise ConfigError(f"insecure must be True or False, got {self.insecure!r}")
        _check_imports(self.imports)
        _check_variables(self.variables)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call ``function(*args)`` in every worker and return the list of results, by rank.

        The call blocks until all workers have finished. `timeout` is in seconds; None means no limit.

        Raises
        ------
        WorkerError
            The function raised an error, or a worker died more often than `worker_restarts`. All other actors
            are ended. If other workers raised errors because they had lost this worker, the reported error is
            that of the lost worker, if it has one.
        KVStoreError
            A server or the scheduler failed.
        TimeoutError
            Ray has no resources for the actors, or the workers did not finish in time. All actors are ended.
        """
        _check_timeout(timeout)
        with self.start(function, *args) as run:
            return run._wait_for_workers(
                timeout, "all are ended: allow more time, or find out what they wait for"
            )

    def start(self, function: Callable[..., Any], *args: Any) -> Run:
        """Start all actors and their work, and return a `Run`. `Run.wait` returns the results.

        Raises
        ------
        ArgumentError
            `function` is not callable.
        TimeoutError
            Ray has no resources for the actors, or the scheduler did not report its address in time.
        """
        if not callable(function):
            raise ArgumentError(f"function must be callable, not {function!r}")
        run = Run(self)
        try:
            run._start_actors(function, args)
        except BaseException:
            run.close()
            raise
        return run


class Run:
    """A running job. As a context manager, it ends the remaining actors at the end of the block.

    Attributes
    ----------
    workers : list of actor handles
        The workers by rank. Consecutive ranks are on the same node.
    servers : list of actor handles
        The servers by rank.
    scheduler : actor handle
        The scheduler.
    """

    def __init__(self, job: Job) -> None:
        self.workers: list[Any] = []
        self.servers: list[Any] = []
        self.scheduler: Any = None
        self._job, self._name = job, new_job()
        self._parts: dict[Any, ProcessRole] = {}  # promises of results
        self._results: dict[int, Any] = {}
        self._group: Any = None
        self._failures: list[tuple[ProcessRole, Exception]] = []
        self._failure: KVStoreError | None = None  # the results
        self._closed = False

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait for all workers and return the list of their results, by rank.

        A second call returns the same results, or raises the same error.

        Raises
        ------
        WorkerError, KVStoreError
            See `Job.run`. All actors are ended.
        TimeoutError
            The workers have not finished within `timeout` seconds. The run continues, and `wait` can be
            called again.
        ClosedError
            The run was closed before the workers had finished.
        """
        _check_timeout(timeout)
        return self._wait_for_workers(timeout, "they continue: wait again, or close the run")

    def close(self) -> None:
        """End all actors, at once. A second call does nothing."""
        self._closed = True
        for actor in (*self.workers, *self.servers, self.scheduler):
            if actor is not None:
                with contextlib.suppress(_ray.exceptions.RayError):
                    _ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ starting

    def _start_actors(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        job = self._job
        if not _ray.is_initialized():
            _ray.init()
        alone = sum(bool(node["Alive"]) for node in _ray.nodes()) == 1
        certificates = None if alone or job.insecure else Certificates(job.num_workers, job.num_servers)

        def keys(part: ProcessRole) -> bytes:
            return certificates.of(part.role, part.rank).to_json() if certificates else b""

        self._reserve_bundles()
        self.scheduler = self._actor_class(_SchedulerActor, 0, {}, 0, max_concurrency=4).remote()
        part = ProcessRole("scheduler", 0)
        address = self._scheduler_address(
            self.scheduler.start.remote(self._common_variables(part, ""), alone, keys(part))
        )
        self._parts[self.scheduler.wait.remote()] = part
        for rank in range(job.num_servers):
            part = ProcessRole("server", rank)
            server = self._actor_class(
                _ServerActor, rank, job.resources_per_server, job.server_restarts
            ).remote()
            self.servers.append(server)
            told = self._common_variables(part, address), alone, keys(part), job.imports, self.scheduler
            self._parts[server.serve.remote(rank, *told)] = part
        self._start_workers(address, keys, function, args)

    def _start_workers(
        self,
        address: str,
        keys: Callable[[ProcessRole], bytes],
        function: Callable[..., Any],
        args: Sequence[Any],
    ) -> None:
        job = self._job
        kind = job.resources_per_worker, job.worker_restarts
        made = [
            self._actor_class(_WorkerActor, job.num_servers + rank, *kind).remote()
            for rank in range(job.num_workers)
        ]
        self.workers = made  # assigned first, so that they are ended in any case
        self.workers, places = _by_node(made, self._get_results([worker.node.remote() for worker in made]))
        for rank, worker in enumerate(self.workers):
            part = ProcessRole("worker", rank)
            place = rank, job.num_workers, places[rank]
            told = self._common_variables(part, address), keys(part), self.scheduler
            self._parts[worker.run.remote(place, *told, function, tuple(args))] = part

    def _reserve_bundles(self) -> None:
        """Reserve the resources of all actors."""
        job = self._job
        bundles = [dict(job.resources_per_server)] * job.num_servers
        bundles += [dict(job.resources_per_worker)] * job.num_workers
        self._group = placement_group(bundles, strategy=job.strategy)
        if not self._group.wait(job.timeout):
            servers = f"{job.num_servers} servers with {dict(job.resources_per_server)} each"
            workers = f"{job.num_workers} workers with {dict(job.resources_per_worker)} each"
            raise TimeoutError(
                f"Ray found no resources for {servers} and {workers} within {job.timeout:g} s; it has "
                f"{_ray.cluster_resources()}"
            )

    def _actor_class(
        self, kind: type, bundle: int, resources: Mapping[str, float], restarts: int, **options: Any
    ) -> Any:
        """Return the class of an actor with its placement.

        The scheduler shares a server's bundle and needs no resources.
        """
        own = dict(resources)
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=bundle
        )
        return _ray.remote(kind).options(
            num_cpus=own.pop("CPU", 0),
            num_gpus=own.pop("GPU", 0),
            resources=own or None,
            scheduling_strategy=strategy,
            max_restarts=restarts,
            max_task_retries=restarts,
            **options,
        )

    def _common_variables(self, part: ProcessRole, address: str) -> dict[str, str]:
        """Return the variables that do not depend on the node of an actor."""
        job = self._job
        found = variables_of(part, job.variables, job.num_workers, job.num_servers, address)
        found |= {"KVSTORE_JOB": self._name, "KVSTORE_SCHEDULER": address, "KVSTORE_PORT": "0"}
        found["KVSTORE_INSECURE"] = str(int(job.insecure))
        if job.snapshot:
            found["KVSTORE_SNAPSHOT"] = os.path.abspath(job.snapshot)
            found["KVSTORE_SERVER_RESTARTS"] = str(job.server_restarts * job.num_servers)
        if job.snapshot_interval is not None:
            found["KVSTORE_SNAPSHOT_INTERVAL"] = str(job.snapshot_interval)
        return found

    def _scheduler_address(self, promise: Any) -> str:
        try:
            return str(self._get_results(promise))
        except _ray.exceptions.RayError as error:
            raise KVStoreError(f"the scheduler did not start: {_failure_reason(error)}") from error

    def _get_results(self, promises: Any) -> Any:
        try:
            return _ray.get(promises, timeout=self._job.timeout)
        except _ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"Ray did not start the actors within {self._job.timeout:g} s") from error

    # ------------------------------------------------------------------------------------------- waiting

    def _wait_for_workers(self, timeout: float | None, then: str) -> list[Any]:
        """Wait for all workers; `then` is the advice in the error of a wait that was too short."""
        until = None if timeout is None else time.monotonic() + timeout
        while len(self._results) < self._job.num_workers:
            self._check_open()
            if not self._process_results(None if until is None else max(0.0, until - time.monotonic())):
                late = [str(rank) for rank in range(self._job.num_workers) if rank not in self._results]
                raise TimeoutError(f"not finished after {timeout:g} s: rank {', '.join(late)}; {then}")
            if self._failures:
                self._raise_failure()
        if not self._closed:
            self._wait_for_servers()
        return [self._results[rank] for rank in range(self._job.num_workers)]

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise ClosedError("the run was closed before its workers had finished: start another run")

    def _process_results(self, timeout: float | None) -> bool:
        """Wait until actors have ended, and process their results; return False if none has ended."""
        ready, _ = _ray.wait(list(self._parts), num_returns=1, timeout=timeout)
        if ready:  # other actors can have ended together with it
            ready, _ = _ray.wait(list(self._parts), num_returns=len(self._parts), timeout=0)
        for promise in ready:
            self._process_result(promise)
        return bool(ready)

    def _process_result(self, promise: Any) -> None:
        """Process the result of an actor that has ended."""
        part = self._parts.pop(promise)
        try:
            result = _ray.get(promise)
        except _ray.exceptions.RayError as error:
            self._failures.append((part, error))
            return
        if part.role == "worker":
            self._results[part.rank] = result
            # The end of the process leaves the job, so that the other processes need not wait for it.
            self.workers[part.rank].__ray_terminate__.remote()

    def _raise_failure(self) -> None:
        """End all actors, and raise the failure that is not a consequence of another failure."""
        until = time.monotonic() + _MOMENT
        while self._lacks_cause() and (left := until - time.monotonic()) > 0:
            self._process_results(left)
        self.close()
        part, error = min(self._failures, key=_consequence_rank)
        self._failure = _actor_failure(part, error)
        raise self._failure from error

    def _lacks_cause(self) -> bool:
        """Return whether all failures are consequences of losses whose cause can still be reported."""
        causes = [_error_cause(error) for _, error in self._failures]
        missed = {(one.role, one.rank) for one in causes if isinstance(one, PeerLostError)}
        at_work = {(part.role, part.rank) for part in self._parts.values()}
        return all(isinstance(one, PeerLostError) for one in causes) and bool(missed & at_work)

    def _wait_for_servers(self) -> None:
        """Let servers and scheduler end by themselves."""
        until = time.monotonic() + _LEAVE
        while self._parts and (left := until - time.monotonic()) > 0:
            ready, _ = _ray.wait(list(self._parts), num_returns=1, timeout=left)
            for promise in ready:
                self._parts.pop(promise)
        self.close()


def _by_node(workers: Sequence[Any], nodes: Sequence[str]) -> tuple[list[Any], list[tuple[int, int]]]:
    """Sort workers by node; return the local rank and the local number of each."""
    order = sorted(range(len(workers)), key=lambda index: (nodes.index(nodes[index]), index))
    counts = collections.Counter(nodes)
    seen: collections.Counter[str] = collections.Counter()
    places = []
    for index in order:
        places.append((seen[nodes[index]], counts[nodes[index]]))
        seen[nodes[index]] += 1
    return [workers[index] for index in order], places


def _is_amount(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < math.inf


def _check_resources(name: str, resources: object) -> None:
    if not isinstance(resources, Mapping):
        raise ConfigError(f'{name} must be a mapping such as {{"CPU": 1}}, got {resources!r}')
    for kind, amount in resources.items():
        if not isinstance(kind, str) or not kind:
            raise ConfigError(f"{name} must have names of resources as keys, not {kind!r}")
        if not _is_amount(amount):
            raise ConfigError(f"{name}: {kind} must be a number of at least 0, got {amount!r}")
    if not any(resources.values()):
        raise ConfigError(f"{name} must request resources: Ray places actors by their resources")


def _check_imports(imports: object) -> None:
    texts = not isinstance(imports, str) and isinstance(imports, Sequence)
    if not texts or not all(isinstance(name, str) for name in imports):  # type: ignore[attr-defined]
        raise ConfigError(f"imports must be a list of names of modules, got {imports!r}")


def _check_variables(variables: object) -> None:
    if not isinstance(variables, Mapping):
        raise ConfigError(f'variables must be a mapping such as {{"NAME": "value"}}, got {variables!r}')
    for name, value in variables.items():
        if not isinstance(name, str) or not name or set(name) & {"=", "\0"}:
            raise ConfigError(f"variables: {name!r} is not a valid name of a variable")
        if not isinstance(value, str) or "\0" in value:
            raise ConfigError(f"variables: {name} must be a str, got {value!r}")


def _check_timeout(timeout: object) -> None:
    if timeout is not None and not _is_amount(timeout):
        raise ConfigError(f"timeout must be None or a number of seconds of at least 0, got {timeout!r}")


def _consequence_rank(failed: tuple[ProcessRole, Exception]) -> int:
    """Return how likely a failure is a consequence of other failures: the least likely one is raised.

    An error of the function itself, or the death of a process, is never a consequence.
    """
    part, error = failed
    cause = _error_cause(error)
    if isinstance(cause, PeerLostError):
        return 3
    if isinstance(cause, KVStoreError):
        return 2 if part.role == "worker" else 1
    return 0


def _error_cause(error: Exception) -> object:
    """Return the exception of the function, if it raised one; else Ray's error."""
    cause = getattr(error, "cause", None)
    return error if cause is None else cause


def _actor_failure(part: ProcessRole, error: Exception) -> KVStoreError:
    text = f"{part.name} failed: {_failure_reason(error)}"
    return WorkerError(text, rank=part.rank) if part.role == "worker" else KVStoreError(text)


def _failure_reason(error: Exception) -> str:
    """Return the text of an error of Ray: the error of the function, with its traceback, if it has one."""
    return str(error).strip() or type(error).__name__


# ------------------------------------------------------------------------------------------------- the actors


class _SchedulerActor:
    """The scheduler, in its own thread; it also counts the starts of each actor."""

    def __init__(self) -> None:
        self._starts: collections.Counter[tuple[str, int]] = collections.Counter()
        self._bound, self._over = threading.Event(), threading.Event()
        self._address = ""
        self._error: BaseException | None = None

    def start(self, common: Mapping[str, str], alone: bool, keys: bytes) -> str:
        """Start the scheduler, and return its address."""
        host = _actor_host(alone)
        found = {**common, "KVSTORE_HOST": host, "KVSTORE_SCHEDULER": addresses.tcp_address(host, 0)}
        threading.Thread(target=self._serve_job, args=(found, keys), daemon=True).start()
        if not self._bound.wait(_FIRST_WORD):
            raise TimeoutError(f"the scheduler did not report its address within {_FIRST_WORD:g} s")
        if self._error is not None:
            raise self._error
        return self._address

    def wait(self) -> None:
        """Wait until the job has ended."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def started(self, role: str, rank: int) -> int:
        """Count a start of an actor, and return the number of earlier starts."""
        self._starts[role, rank] += 1
        return self._starts[role, rank] - 1

    def _serve_job(self, found: Mapping[str, str], keys: bytes) -> None:
        try:
            with _keys_file(keys) as descriptor:
                serve.run_scheduler({**process_variables(), **found, **descriptor}, self._report_address)
        except BaseException as error:
            self._error = error
        finally:
            self._bound.set()
            self._over.set()

    def _report_address(self, address: str) -> None:
        self._address = address
        self._bound.set()


class _ServerActor:
    """A server; Ray calls `serve` again when it has started the process again."""

    def serve(
        self,
        rank: int,
        common: Mapping[str, str],
        alone: bool,
        keys: bytes,
        imports: Sequence[str],
        scheduler: Any,
    ) -> None:
        """Run the server until the job has ended."""
        restart = _ray.get(scheduler.started.remote("server", rank))
        own = {"KVSTORE_HOST": _actor_host(alone), "KVSTORE_RESTART": str(restart)}
        with _keys_file(keys) as descriptor:
            serve.run_server({**process_variables(), **common, **own, **descriptor}, imports)


class _WorkerActor:
    """A worker; Ray calls `run` again when it has started the process again."""

    def node(self) -> str:
        """Return the node of the actor."""
        return str(_ray.get_runtime_context().get_node_id())

    def run(
        self,
        place: tuple[int, int, tuple[int, int]],
        common: Mapping[str, str],
        keys: bytes,
        scheduler: Any,
        function: Callable[..., Any],
        args: Sequence[Any],
    ) -> Any:
        """Set the variables of the job, and call the function."""
        rank, size, local = place
        restart = _ray.get(scheduler.started.remote("worker", rank))
        with _keys_file(keys) as descriptor:
            own = worker_variables(common["KVSTORE_JOB"], rank, size, restart, local)
            set_variables({**common, **own, **descriptor})
            return function(*args)


def _actor_host(alone: bool) -> str:
    """Return the address of this actor for other actors."""
    return loopback_address() if alone else str(_ray.util.get_node_ip_address())


@contextlib.contextmanager
def _keys_file(data: bytes) -> Any:
    """Put keys into a memfd, which `settings.roles` reads."""
    if not data:
        yield {}
        return
    descriptor = write_to_memory(JobKeys.from_json(data))
    try:
        yield {"KVSTORE_KEYS_FD": str(descriptor)}
    finally:
        os.close(descriptor)
