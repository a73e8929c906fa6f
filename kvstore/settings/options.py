"""Options of a store, as a frozen dataclass. An argument takes precedence over the variable and default."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import ArgumentError, ConfigError, nearest
from .definitions import DEFAULTS, IGNORED, SETTINGS, WORKER
from .environment import first_set, process_variables

log = logging.getLogger("kvstore.config")

_MOST_THREADS = 4096


@dataclass(frozen=True)
class StoreConfig:
    """Options of `kvstore.create`.

    Attributes
    ----------
    timeout : float
        Seconds after which any wait ends with an error. Variable: KVSTORE_TIMEOUT.
    threads : int
        Number of threads for large arrays in this process; 0 uses all available cores. Variables:
        KVSTORE_NUM_THREADS, MXNET_KVSTORE_REDUCTION_NTHREADS.
    group : str
        Name that pairs the stores of a job, together with the order of their creation.
    processes : int
        1 keeps a ``"local"`` store in this process, also under a launcher, and allows any store to have fewer
        workers than the launcher has started. With 0 the launcher decides.
    on_peer_loss : str
        ``"raise"`` or ``"continue"``: what the other workers do after a worker is lost.
    spin : float
        Seconds that a wait for other processes spins before it sleeps. A wake-up costs tens of microseconds.
        Variable: KVSTORE_SPIN.
    slice_bytes : int
        Stores on servers: bytes of the slices into which large keys are cut. 0 means 1 MB, or for ``"p3"``
        MXNET_KVSTORE_SLICE_THRESHOLD elements of 4 bytes (40,000). Variable: KVSTORE_SLICE_BYTES.
    credit_bytes : int
        Stores on servers: bytes in flight to one server that it has not received yet. Further slices wait, in
        order of priority. Variable: KVSTORE_CREDIT_BYTES.
    same_host_shm : bool
        Stores on servers: data for servers on this machine goes through shared memory. Variable:
        KVSTORE_SAME_HOST_SHM.
    hierarchy : str
        Stores on servers with rounds. ``"host"``: the workers of one host sum in shared memory first, and one
        sum for each host travels to the servers. ``"auto"``: as ``"host"`` if more than one host has more
        than one worker, else as ``"flat"``. ``"flat"``: each worker sends what it pushes. The same on all
        workers. Variable: KVSTORE_HIERARCHY.
    cuda_ipc : int
        How ``"shared"`` transfers GPU arrays between processes. 0: through host memory only. 1: through CUDA
        IPC if that works. Variable: KVSTORE_CUDA_IPC.
    """

    timeout: float = DEFAULTS["timeout"]
    threads: int = DEFAULTS["threads"]
    group: str = DEFAULTS["group"]
    processes: int = DEFAULTS["processes"]
    on_peer_loss: str = DEFAULTS["on_peer_loss"]
    spin: float = DEFAULTS["spin"]
    slice_bytes: int = DEFAULTS["slice_bytes"]
    credit_bytes: int = DEFAULTS["credit_bytes"]
    same_host_shm: bool = DEFAULTS["same_host_shm"]
    hierarchy: str = DEFAULTS["hierarchy"]
    cuda_ipc: int = DEFAULTS["cuda_ipc"]

    def __post_init__(self) -> None:
        if not 0 < self.timeout <= threading.TIMEOUT_MAX:
            raise ConfigError(f"timeout must be a positive, finite number of seconds, got {self.timeout}")
        if not 0 <= self.threads <= _MOST_THREADS:
            raise ConfigError(f"threads must lie between 0 and {_MOST_THREADS}, got {self.threads}")
        if self.processes not in (0, 1):
            raise ConfigError(f"processes must be 1 (this process) or 0 (as launched), got {self.processes}")
        if not 0 <= self.spin <= threading.TIMEOUT_MAX:
            raise ConfigError(f"spin must be a number of seconds, 0 or more, got {self.spin}")
        if self.cuda_ipc not in (0, 1):
            raise ConfigError(f"cuda_ipc must be 1 (where it works) or 0 (never), got {self.cuda_ipc}")
        if self.slice_bytes and not 4096 <= self.slice_bytes <= 1 << 30:
            raise ConfigError(f"slice_bytes must be 0 or from 4 KB to 1 GB, got {self.slice_bytes}")
        if not 1 << 16 <= self.credit_bytes <= 1 << 40:
            raise ConfigError(f"credit_bytes must be at least 64 KB, got {self.credit_bytes}")
        if self.on_peer_loss not in ("raise", "continue"):
            raise ConfigError(f"on_peer_loss must be 'raise' or 'continue', got {self.on_peer_loss!r}")
        if self.hierarchy not in ("auto", "host", "flat"):
            raise ConfigError(f"hierarchy must be 'auto', 'host' or 'flat', got {self.hierarchy!r}")


def store_config(options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> StoreConfig:
    """Return the options of a store from arguments and environment.

    Raises
    ------
    ConfigError
        An unknown option, or a value out of range.
    ArgumentError
        A value of the wrong type.
    """
    env = process_variables() if environment is None else environment
    known = [field.name for field in fields(StoreConfig)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        named = ", ".join(f"{name}{nearest(name, known)}" for name in unknown)
        raise ConfigError(f"unknown option {named}; known are {', '.join(known)}")
    for variable, reason in IGNORED.items():
        if variable in env:
            log.warning("%s is set and has no effect here: %s", variable, reason)
    chosen = {**_from_environment(env), **{name: (value, name) for name, value in options.items()}}
    return StoreConfig(
        **{name: _typed_option(name, value, source) for name, (value, source) in chosen.items()}
    )


def _from_environment(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    found = {field.name: first_set(env, SETTINGS[field.name].names(WORKER)) for field in fields(StoreConfig)}
    return {name: (env[variable], variable) for name, variable in found.items() if variable}


def _typed_option(name: str, value: Any, source: str) -> Any:
    wanted = SETTINGS[name].kind
    if wanted is str and not isinstance(value, str):
        raise ArgumentError(f"{source} must be a str, not {value!r}")
    if wanted is bool:
        found = {"0": False, "1": True}.get(value) if isinstance(value, str) else value
        if not isinstance(found, bool):
            raise ArgumentError(f"{source} must be a bool (0 or 1 in a variable), not {value!r}")
        return found
    whole = wanted is not int or isinstance(value, str) or hasattr(value, "__index__")
    try:
        if isinstance(value, bool) or not whole:
            raise TypeError
        return wanted(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"{source} must be of type {wanted.__name__}, not {value!r}") from None


def slice_threshold(environment: Mapping[str, str] | None = None) -> int:
    """Return the number of elements of a slice of `p3`, from the variable of MXNet.

    Raises
    ------
    ConfigError
        The variable is not an integer from 1024 to 2**28.
    """
    env = process_variables() if environment is None else environment
    text = env.get("MXNET_KVSTORE_SLICE_THRESHOLD") or str(DEFAULTS["slice_elements"])
    if not text.isdecimal() or not 1024 <= int(text) <= 1 << 28:
        raise ConfigError(
            f"MXNET_KVSTORE_SLICE_THRESHOLD={text!r} is not an integer from 1024 to 2**28: unset it"
        )
    return int(text)
