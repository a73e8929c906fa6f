"""NCCL by nccl4py: its low-level calls, its element types, and the errors of kvstore for those of NCCL."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from ....devices import driver
from ....errors import KVStoreError, MissingBackendError, PeerLostError
from ....kernels import cpu

#: Name of an element type -> its number in nccl.h.
TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
_SIZES = {name: size for name, (size, _) in cpu.dtypes().items()}
SUM, MAX = 0, 2  # ncclRedOp_t

_ID_BYTES = 128
_REMOTE_ERROR = 6

_REMEDY = "`pip install 'kvstore-train[nccl]'`"


class CollectiveArray(NamedTuple):
    """One array of a collective operation, contiguous on one device: read at `send`, written at `recv`."""

    device: int
    send: int
    recv: int
    numel: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.numel * _SIZES[self.dtype]


class NcclLibrary:
    """The calls that the store makes. Communicators are objects of nccl4py.

    Raises
    ------
    MissingBackendError
        nccl4py, NCCL or a GPU is missing.
    """

    def __init__(self) -> None:
        self._api = _import_nccl()
        self.driver = _usable_driver()

    def versions(self) -> dict[str, str]:
        """Return names and versions of the binding and of its NCCL."""
        import nccl

        number = int(self._api.get_version())
        return {
            "nccl4py": getattr(nccl, "__version__", None) or _installed_version("nccl4py"),
            "NCCL": f"{number // 10000}.{number // 100 % 100}.{number % 100}",
        }

    def unique_id(self) -> bytes:
        """Make the secret name of one communicator, with which its processes meet."""
        with self._translated_errors("the start of NCCL"):
            made = self._api.get_unique_id()
        return ctypes.string_at(made.ptr, _ID_BYTES)

    def join(self, name: bytes, rank: int, size: int, device: int) -> Any:
        """Make this process's communicator; waits for the other processes without a deadline."""
        made = self._api.UniqueId.from_buffer(bytearray(name))
        with self.driver.on(device), self._translated_errors("the start of NCCL"):
            return self._api.comm_init_rank(size, made.ptr, rank)

    def join_all(self, devices: Sequence[int]) -> list[Any]:
        """Make communicators of several devices of this process."""
        with (
            self.driver.on(devices[0]),
            self._translated_errors(f"the start of NCCL on GPUs {list(devices)}"),
        ):
            return list(self._api.comm_init_all(len(devices), list(devices)))

    @contextmanager
    def group(self, device: int, what: str) -> Iterator[None]:
        """Start the calls of the block together at its end.

        Without this, calls on several devices would wait.
        """
        with self.driver.on(device), self._translated_errors(what):
            self._api.group_start()
            try:
                yield
            except BaseException:
                with suppress(self._api.NCCLError):  # it raises the same error again
                    self._api.group_end()
                raise
            self._api.group_end()

    def allreduce(self, comm: Any, job: CollectiveArray, stream: int, op: int) -> None:
        """Start to replace an array by its sum or maximum; in a group."""
        self._api.all_reduce(job.send, job.recv, job.numel, TYPES[job.dtype], op, comm, stream)

    def broadcast(self, comm: Any, job: CollectiveArray, stream: int) -> None:
        """Start to copy rank 0's array to all ranks; in a group."""
        self._api.broadcast(job.send, job.recv, job.numel, TYPES[job.dtype], 0, comm, stream)

    def error_of(self, comm: Any) -> KVStoreError | None:
        """Return the error of a communicator in the background, or None; never waits."""
        try:
            code = int(self._api.comm_get_async_error(comm))
        except self._api.NCCLError as error:
            return self._error_of(error, "an operation under way")
        return self._error_of_code(code, "an operation under way") if code not in (0, _IN_PROGRESS) else None

    def destroy(self, comm: Any) -> None:
        """Free a communicator without running operations."""
        with self._translated_errors("the end of a communicator"):
            self._api.comm_destroy(comm)

    def abort(self, comm: Any) -> None:
        """Abort the running operations of a communicator, also in other threads, and free it."""
        with self._translated_errors("the end of a communicator"):
            self._api.comm_abort(comm)

    # ------------------------------------------------------------------------------------------ errors

    @contextmanager
    def _translated_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._api.NCCLError as error:
            raise self._error_of(error, what) from error

    def _error_of(self, error: Any, what: str) -> KVStoreError:
        return self._error_of_code(int(error.status), what)

    def _error_of_code(self, code: int, what: str) -> KVStoreError:
        text = str(self._api.get_error_string(code))
        detail = str(self._api.get_last_error(self._api.Comm(0))).strip()
        if code == _REMOTE_ERROR:
            return PeerLostError(f"another worker is lost: in {what} NCCL reports {text!r} ({detail})")
        return KVStoreError(
            f"in {what} NCCL reports {text!r} (error {code}: {detail or 'no details'}); NCCL_DEBUG=INFO "
            "in the environment shows more"
        )


_IN_PROGRESS = 7


def _import_nccl() -> Any:
    try:
        import nccl  # noqa: F401 - raises if it is not installed
        from nccl.bindings import nccl as api

        api.get_version()
    except Exception as error:  # without NCCL's library, the binding raises errors of other classes
        raise MissingBackendError(
            f"store 'nccl' needs NCCL, its binding for Python from 3.10 on, and an NVIDIA driver: {_REMEDY} "
            f"(with a driver of CUDA 12, nvidia-nccl-cu12 in place of nvidia-nccl-cu13); {error}"
        ) from error
    return api


def _usable_driver() -> driver.CudaDriver:
    try:
        return driver.get_driver()
    except MissingBackendError as error:
        raise MissingBackendError(f"store 'nccl' has nothing to work on: {error}; {_REMEDY}") from error


def _installed_version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
