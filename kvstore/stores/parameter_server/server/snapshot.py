"""Snapshots of a server's store: a folder of safetensors files, and a manifest that names the valid ones.

A snapshot writes the changed slices to a new file, then replaces the manifest atomically, then removes files
that the manifest does not name. A kill leaves the previous snapshot. The manifest has a checksum of its text,
and of the files that it names.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .... import tensor_file
from ....arrays.element_types import dtype_named
from ....atomic_files import has_new_content, read_with_checksum, write_with_checksum
from ....errors import StateFileError
from ....optimizer.optimizer import State as Tree
from ...entry import Array
from ..protocol.messages import KeyEntry
from ..protocol.optimizer_states import PartState
from ..transport.shared_buffers import SharedValues
from .dense import DenseSlice
from .optimizer import OptimizerState, OptimizerVersion
from .sparse import TableSlice

FORMAT = "kvstore.server"
VERSION = 2
_MANIFEST = "manifest.json"

Held = DenseSlice | TableSlice
Tensors = dict[str, Array]


class SnapshotManifest(msgspec.Struct):
    """The content of a snapshot."""

    format: str
    version: int
    store: int
    server: int
    #: The number of the snapshot; part of the files' names.
    number: int
    entries: list[KeyEntry]
    rules: list[dict[str, Any]]
    #: By slice the name of its file, and its description in that file.
    slices: dict[int, tuple[str, dict[str, Any]]]
    #: Checksums by the names of the files.
    files: dict[str, str]
    versions: dict[int, int]
    rounds: dict[str, Any]


class SnapshotFolder:
    """The folder of the snapshots of one store shard."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._last: SnapshotManifest | None = None

    def is_there(self) -> bool:
        """Return whether there is a snapshot: a first one is complete when there is a manifest."""
        return (self.path / _MANIFEST).exists()

    def remove_files(self) -> None:
        """Remove all files, as far as possible; the manifest first, so that a kill leaves no snapshot."""
        with contextlib.suppress(OSError):
            (self.path / _MANIFEST).unlink()
        shutil.rmtree(self.path, ignore_errors=True)

    def read_manifest(self) -> SnapshotManifest:
        """Return the manifest of the last snapshot; StateFileError: damaged, foreign, or missing."""
        path = self.path / _MANIFEST
        try:
            manifest = msgspec.json.decode(read_with_checksum(path), type=SnapshotManifest)
        except FileNotFoundError:
            raise StateFileError(f"{path} is missing, so there is no snapshot in this folder") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StateFileError(f"{path} is damaged or no manifest of a server: {error}") from error
        if (manifest.format, manifest.version) != (FORMAT, VERSION):
            raise StateFileError(
                f"{path} is {manifest.format!r} of version {manifest.version}, not {FORMAT!r} of {VERSION}"
            )
        return manifest

    def read_tensors(self, manifest: SnapshotManifest) -> dict[int, Tensors]:
        """Return the arrays of each slice; StateFileError: a file is damaged or missing."""
        content = {name: self._read_file(name, checksum) for name, checksum in manifest.files.items()}
        return {slice: content[name][slice] for slice, (name, _) in manifest.slices.items()}

    def _read_file(self, name: str, checksum: str) -> dict[int, Tensors]:
        def parse(text: str, tensors: Tensors) -> dict[int, Tensors]:
            found: dict[int, Tensors] = {slice: {} for slice in json.loads(text)}
            for full, array in tensors.items():
                slice, _, part = full.partition("/")
                found[int(slice)][part] = array
            return found

        if Path(name).name != name:
            raise StateFileError(f"{self.path / _MANIFEST} names a file elsewhere: {name!r}")
        try:
            return tensor_file.read_file(str(self.path / name), FORMAT, parse, checksum=checksum)
        except FileNotFoundError as error:
            raise StateFileError(f"{self.path / name} is gone, a part of the last snapshot") from error

    def write_files(
        self, manifest: SnapshotManifest, changed: dict[int, tuple[dict[str, Any], Tensors]]
    ) -> None:
        """Write a snapshot; this sets number, slices and files of the manifest.

        `changed`: by slice its description and its arrays; other slices are as in the previous snapshot.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self._last is None:
            with contextlib.suppress(StateFileError):
                self._last = self.read_manifest()
        last = self._last
        manifest.number = 1 if last is None else last.number + 1
        name = f"{manifest.number}.safetensors"
        wanted = {piece.id for entry in manifest.entries for piece in entry.slices}
        kept = {} if last is None else {s: there for s, there in last.slices.items() if s in wanted}
        manifest.slices = {**kept, **{slice: (name, said) for slice, (said, _) in changed.items()}}
        checksums = {} if last is None else dict(last.files)
        if changed:
            tensors = {f"{s}/{part}": a for s, (_, arrays) in changed.items() for part, a in arrays.items()}
            text = json.dumps(list(changed))
            checksums[name] = tensor_file.write_file(str(self.path / name), FORMAT, text, tensors)
        manifest.files = {name: checksums[name] for name, _ in manifest.slices.values()}
        try:
            write_with_checksum(self.path / _MANIFEST, msgspec.json.encode(manifest))
        except StateFileError as error:
            if has_new_content(error):  # the next snapshot must not overwrite the files of this snapshot
                self._last = manifest
            raise
        self._last = manifest
        self._remove_unused(manifest)

    def _remove_unused(self, manifest: SnapshotManifest) -> None:
        """Remove files that the manifest does not name, and incomplete files of a killed process."""
        needed = {_MANIFEST, *manifest.files}
        for path in self.path.iterdir():
            if path.name not in needed and (path.suffix == ".safetensors" or path.suffix == ".tmp"):
                path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------- one slice


def describe_slice(held: Held) -> tuple[dict[str, Any], Tensors]:
    """Return a slice's description for a file, and copies of its arrays."""
    tensors: Tensors = {}
    said = _collect_tensors(held, tensors)
    return said, {name: array.copy() for name, array in tensors.items()}


def _collect_tensors(held: Held, tensors: Tensors) -> dict[str, Any]:
    if isinstance(held, DenseSlice):
        tensors["value"] = held.live_value()
        said: dict[str, Any] = {"state": _describe_state(held.state, held.of.key, "state", tensors)}
        if held.start == 0 and held.of.whole:
            said["whole"] = _describe_state(held.of.state, held.of.key, "whole", tensors)
        return said
    tensors["rows"], tensors["blank"] = held.held, held.blank
    if held.index is not None:
        tensors["ids"] = held.ids_as_they_lie()
    said = {"state": _describe_state(held.state, held.key, "state", tensors)}
    if held.has_blank_tree():
        said["blank"] = _describe_tree(held.blank_tree, "blank-state", tensors)
    if held.given is not None:
        said["given"] = _describe_given(*held.given, tensors)
    return said


def _describe_given(settings: OptimizerVersion, given: PartState, tensors: Tensors) -> dict[str, Any]:
    """Describe a loaded state that becomes the table's with its next update."""
    if given.ids is not None:
        tensors["given-ids"] = given.ids
    said = _describe_part(settings.generation, given, "given", tensors)
    return {**said, "blank": _describe_tree(given.blank, "given-blank", tensors)}


def _take_given(
    held: TableSlice, said: dict[str, Any], tensors: Tensors, versions: dict[int, OptimizerVersion]
) -> None:
    settings = versions.get(said["era"])
    if settings is None or settings.optimizer is None:
        return  # as in `_take_state`
    tree = _restored_tree(said["outline"], "given", tensors)
    blank = _restored_tree(said["blank"], "given-blank", tensors)
    counts = said["updates"], said["num_update"]
    held.given = settings, PartState(said["known"], tree, tensors.get("given-ids"), blank, *counts)


def _describe_state(state: OptimizerState, key: Any, name: str, tensors: Tensors) -> dict[str, Any] | None:
    if state.updater is None:
        return None
    known, tree = key in state.updater.states, state.updater.states.get(key)
    part = PartState(known, tree, None, None, state.updates, state.num_update)
    return _describe_part(state.generation, part, name, tensors)


def _describe_part(generation: int, part: PartState, name: str, tensors: Tensors) -> dict[str, Any]:
    counts = {"era": generation, "updates": part.updates, "num_update": part.num_update}
    return {**counts, "known": part.known, "outline": _describe_tree(part.tree, name, tensors)}


def _describe_tree(tree: Tree, name: str, tensors: Tensors) -> Any:
    """Return None, the name of an array's type, or a list of these; put the arrays into `tensors`."""
    if isinstance(tree, tuple):
        return [_describe_tree(part, f"{name}.{i}", tensors) for i, part in enumerate(tree)]
    if tree is None:
        return None
    tensors[name] = tree
    return tree.dtype.name


def taken_back(
    held: Held,
    said: dict[str, Any],
    tensors: Tensors,
    versions: Iterable[OptimizerVersion],
    memory: SharedValues | None,
) -> None:
    """Restore a slice from what `describe_slice` returned; `memory` is for dense values."""
    by_generation = {settings.generation: settings for settings in versions}
    if isinstance(held, DenseSlice):
        _take_value(held, _typed_tensor(tensors["value"], held.of.dtype), memory)
        _take_state(held.state, held.of.key, said["state"], "state", tensors, by_generation)
        if "whole" in said:
            _take_state(held.of.state, held.of.key, said["whole"], "whole", tensors, by_generation)
        return
    _take_state(held.state, held.key, said["state"], "state", tensors, by_generation)
    blank = _restored_tree(said["blank"], "blank-state", tensors) if "blank" in said else None
    rows = _typed_tensor(tensors["rows"], held.dtype)
    held.take_back(tensors.get("ids"), rows, _typed_tensor(tensors["blank"], held.dtype), blank)
    if "given" in said:
        _take_given(held, said["given"], tensors, by_generation)


def _take_value(held: DenseSlice, value: Array, memory: SharedValues | None) -> None:
    if value.shape != (held.size,):
        raise StateFileError(f"slice {held.id} of a snapshot has {value.size} elements, not {held.size}")
    np.copyto(held.ensure_memory(memory), value)


def _take_state(
    state: OptimizerState,
    key: Any,
    said: dict[str, Any] | None,
    name: str,
    tensors: Tensors,
    versions: dict[int, OptimizerVersion],
) -> None:
    settings = None if said is None else versions.get(said["era"])
    if said is None or settings is None or settings.optimizer is None:
        return  # of settings that no round will use again
    updater = state.restart_counts(settings, said["updates"], said["num_update"])
    if said["known"]:
        updater.states[key] = _restored_tree(said["outline"], name, tensors)


def _restored_tree(outline: Any, name: str, tensors: Tensors) -> Tree:
    if isinstance(outline, list):
        return tuple(_restored_tree(part, f"{name}.{i}", tensors) for i, part in enumerate(outline))
    return None if outline is None else _typed_tensor(tensors[name], dtype_named(outline)).copy()


def _typed_tensor(array: Array, dtype: np.dtype[Any]) -> Array:
    """View stored bits as the type that was written."""
    same = array.view(dtype) if dtype.name == "bfloat16" else array
    if same.dtype != dtype:
        raise StateFileError(f"a tensor of {array.dtype} where {dtype} was written")
    return same
