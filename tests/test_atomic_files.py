"""Files that are replaced in one step, and the refusals of the system at its end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest

import kvstore as kv
from kvstore.atomic_files import atomic_replacement, has_new_content


def fail_for_folders(patch: pytest.MonkeyPatch, number: int) -> None:
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    patch.setattr(os, "fsync", failing)


def write(path: Path, text: str) -> None:
    with atomic_replacement(path) as beside:
        beside.write_text(text)


def test_a_folder_that_cannot_be_synchronised_is_told_of_a_file_that_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write(path, "old")
    fail_for_folders(monkeypatch, errno.EIO)
    with pytest.raises(kv.StateFileError, match="file is written, but its folder cannot be") as caught:
        write(path, "new")
    assert isinstance(caught.value, OSError) and caught.value.errno == errno.EIO
    assert has_new_content(caught.value)
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file"]


def test_file_systems_that_synchronise_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for_folders(monkeypatch, errno.EINVAL)
    write(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"


def test_a_file_that_cannot_be_synchronised_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write(path, "old")

    def failing(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(kv.StateFileError, match="An existing file is unchanged") as caught:
        write(path, "new")
    assert not has_new_content(caught.value)
    assert path.read_text() == "old"


def test_checkpoints_are_rotated_though_their_folder_is_not_synchronised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = kv.CheckpointManager(tmp_path, keep=1)
    with kv.create() as store:
        store.init("w", np.zeros(3, np.float32))
        manager.save(store, 1)
        manager.wait()
        fail_for_folders(monkeypatch, errno.EIO)
        manager.save(store, 2)
        with pytest.raises(kv.StateFileError, match="is written, but its folder"):
            manager.wait()
        assert manager.steps() == [2]
