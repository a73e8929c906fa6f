"""`CheckpointManager`: writes checkpoints of a job, and restores the last complete one."""

from __future__ import annotations

import copy
import operator
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from ..atomic_files import has_new_content
from ..errors import ArgumentError, ConfigError, KVStoreError, StateFileError
from ..settings.options import store_config
from ..store import KVStore, read_with
from . import contents, file
from .contents import CheckpointContents, CheckpointData
from .folder import CheckpointFolder, log
from .restoring import Checkpoint, restore_store
from .writer import BackgroundWriter


class CheckpointManager:
    """Checkpoints of a job in a folder, one file for each step; files are written during training.

    A file has the values of all keys of a store, its optimizer with settings, states and counts, and
    additions of the program: the position in the data, and arrays that are not in the store. It is a
    safetensors file without code in it, ``step-00001200.safetensors``, which appears when it is complete, and
    ends with the SHA-256 of its content. A process that is killed leaves the older files, and perhaps an
    unfinished one ``.step-*.tmp``, which the next manager of the folder removes.

    Parameters
    ----------
    folder : path
        It is created if it does not exist. With several workers, the folder of worker 0 is used.
    keep : int, optional
        Number of files to keep; older ones are removed after each write. None keeps all.
    timeout : float, optional
        Seconds after which a wait for a write ends with an error; the default is the timeout of stores
        (KVSTORE_TIMEOUT, 300).

    Raises
    ------
    ArgumentError, ConfigError
        `keep` or `timeout` is not valid.
    StateFileError
        The folder cannot be created or read.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import kvstore as kv
    >>> store = kv.create("local")
    >>> store.init("w", np.zeros(2, np.float32))
    >>> with CheckpointManager(tempfile.mkdtemp(), keep=3) as manager:
    ...     manager.save(store, 100, extra={"epoch": 3})
    ...     manager.wait()
    ...     manager.restore(store).extra
    {'epoch': 3}
    """

    def __init__(
        self, folder: str | os.PathLike[str], keep: int | None = None, timeout: float | None = None
    ) -> None:
        self._keep = None if keep is None else _whole_number(keep, "keep", 1)
        options = {} if timeout is None else {"timeout": timeout}
        self._writer = BackgroundWriter(store_config(options).timeout)
        self._folder = CheckpointFolder(folder)
        self._lock = threading.Lock()

    def save(
        self,
        store: KVStore,
        step: int,
        extra: dict[str, Any] | None = None,
        arrays: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy the store now, and write the file in the background.

        All workers can call it, or worker 0 alone: worker 0 writes, and on the other workers the call does
        nothing. If the previous write is not complete, the call first waits for it.

        In stores with rounds, the file is a cut of one step, if worker 0 calls this between two of its steps,
        after it has pushed all keys equally often: no round of a key ends without the part of worker 0, so
        the other workers cannot change values or states in between. In ``"dist_async"`` the other workers
        push concurrently: a key can contain pushes that another key, or the optimizer's state, does not. The
        same holds after worker 0 has called `KVStore.join`.

        Parameters
        ----------
        store : KVStore
            Values and optimizer of this store are saved. An updater that is a function has no states here:
            pass its arrays as `arrays`. Residuals of gradient compression are not saved either: they start at
            zero again.
        step : int
            Number of the step, 0 or more. The file of the same step is replaced.
        extra : dict, optional
            Further data of the step, such as epoch and batch, of types that JSON has.
        arrays : dict, optional
            Arrays in host memory by name. They are copied.

        Raises
        ------
        ArgumentError, ArrayError, DTypeError
            An argument is not valid.
        ConfigError
            The folder has a file of a later step; or the optimizer is of a class that is not registered.
        StateFileError
            The previous write has failed. The error is also the OSError of the system. This step is not
            saved.
        TimeoutError
            The previous write was not complete in time. This step is not saved.
        KVStoreError
            The store cannot be read.
        """
        if _checked_store(store).rank != 0:
            return
        number = _whole_number(step, "step", 0)
        text = contents.as_json({} if extra is None else extra)
        with self._lock:  # serialises the saves of threads
            self._start_save(store, number, text, {} if arrays is None else arrays)

    def _start_save(self, store: KVStore, number: int, text: str, arrays: Any) -> None:
        self._writer.wait()
        self._folder.check_newest(number)
        own = contents.copied_arrays(arrays)
        found = read_with(store, partial(contents.collect_data, step=number, extra=text, arrays=own))
        path = self._folder.file_of(number)
        self._writer.start(
            f"the write of {path}", found.nbytes, partial(self._write_step, path, number, found)
        )

    def _write_step(self, path: str, step: int, found: CheckpointData, tell: Any) -> None:
        try:
            file.write_tensors(path, found.head, found.tensors, tell)
        except StateFileError as error:
            if has_new_content(error):
                self._folder.rotate(step, self._keep)
            raise
        self._folder.rotate(step, self._keep)

    def restore(
        self,
        store: KVStore,
        step: int | None = None,
        check: Callable[[Checkpoint], None] | None = None,
    ) -> Checkpoint | None:
        """Load the newest complete checkpoint into the store.

        All workers must call it, before their first push and at the same place of the program. Worker 0 reads
        the file and sends the result to the other workers, which need no access to the folder. When the call
        returns, the checkpoint is loaded on all workers. A damaged file is skipped, with a warning in the
        log, if an older file is complete.

        Keys of the file that the store has are overwritten, and the other keys of the file are initialised;
        keys that are not in the file do not change. If the store has no optimizer, the optimizer of the
        checkpoint is set; if it has one, that optimizer gets the settings of the checkpoint.

        Parameters
        ----------
        store : KVStore
            A store of the present job, with any number of workers.
        step : int, optional
            The step to load, instead of the newest.
        check : callable, optional
            Worker 0 calls it with the checkpoint before anything changes; it must not use the store. Its
            exception is raised on worker 0, and as `StateFileError` on the other workers.

        Returns
        -------
        Checkpoint or None
            None if there is no checkpoint. Then nothing has changed.

        Raises
        ------
        StateFileError
            A file cannot be read, or has keys of another shape or type or another optimizer than the store;
            or all files are damaged. Nothing has changed. All workers get this error.
        """
        _checked_store(store)
        if check is not None and not callable(check):
            raise ArgumentError(f"check must be a function of a Checkpoint, not {type(check).__name__}")
        self._writer.wait()
        number = None if step is None else _whole_number(step, "step", 0)
        return restore_store(store, partial(self._find_step, number, check))

    def _find_step(
        self, step: int | None, check: Callable[[Checkpoint], None] | None
    ) -> CheckpointContents | None:
        if step is None and not self._folder.steps():
            return None
        path = self._folder.newest_whole() if step is None else self._folder.check_whole(step)
        found = contents.read_checkpoint(path)
        if check is not None:
            check(Checkpoint(found.step, copy.deepcopy(found.extra), dict(found.arrays)))
        return found

    def steps(self) -> list[int]:
        """Return the steps that have files in the folder, in ascending order, including damaged files."""
        return self._folder.steps()

    @property
    def latest(self) -> int | None:
        """The newest step whose file is complete, or None. The file is read for this check."""
        return self._folder.newest()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the last save is on the disk.

        Parameters
        ----------
        timeout : float, optional
            Seconds, instead of the timeout of the manager.

        Raises
        ------
        StateFileError
            The save has failed. The error is also the OSError of the system. Older files are unchanged.
        TimeoutError
            The save is not complete yet. It continues.
        """
        self._writer.wait(timeout)

    def close(self) -> None:
        """Wait as `wait` does. The manager can be used again."""
        self._writer.wait()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait as `wait` does; after an error of the block, an error of the write is only logged."""
        try:
            self.close()
        except KVStoreError as failure:
            if error is None:
                raise
            log.error("%s", failure)

    def __repr__(self) -> str:
        return f"<CheckpointManager {self._folder.path!r}, keep={self._keep}>"


def _checked_store(store: Any) -> KVStore:
    if not isinstance(store, KVStore):
        raise ArgumentError(f"a checkpoint is of a store that kvstore.create has made, not of {store!r}")
    return store


def _whole_number(value: Any, what: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{what} must be an int, not {value!r}") from None
    if number < least or isinstance(value, bool):
        raise ConfigError(f"{what} must be {least} or more, not {value!r}")
    return number
