"""Fuzz what reads bytes in Python: python -m fuzz.guided.readers READER [OPTION...], in `tests`.

Run it in an environment that has Atheris and the project, with `tests/support` on the path. Options are
those of libFuzzer. A reader takes the bytes, or raises an error of ours.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvstore"]):
    import kvstore as kv
    from kvstore import atomic_files
    from kvstore.checkpoint import contents
    from kvstore.launch.hosts import host_list
    from kvstore.optimizer import states
    from kvstore.settings.keys import JobKeys
    from kvstore.stores.parameter_server.scheduler import journal_file
    from kvstore.stores.parameter_server.server import snapshot
    from kvstore.stores.parameter_server.transport.frames import MessageCodec, MessageLimits

import numpy as np
import wire_examples

JOB = MessageCodec("a job", MessageLimits(frame=1 << 16, control=1 << 14, records=256))
Read = Callable[[bytes], object]


def of_file(folder: Path, read: Callable[[Path], object]) -> Read:
    def of_bytes(data: bytes) -> object:
        (folder / "file").write_bytes(data)
        return read(folder / "file")

    return of_bytes


def manifest(folder: Path) -> Read:
    """Return a reader of what a checksum is made for: no fuzzer finds one."""

    def of_bytes(data: bytes) -> object:
        atomic_files.write_with_checksum(folder / "manifest.json", data)
        return snapshot.SnapshotFolder(folder).read_manifest()

    return of_bytes


def seeds(name: str, folder: Path) -> list[bytes]:
    """Return good files and messages."""
    if name == "frames":
        messages = [*wire_examples.control(), *wire_examples.batches()]
        return [bytes(JOB.encode(message)[0]) for message in messages]
    if name == "journal":
        return [journal_file.encode_record(b"one") + journal_file.encode_record(b"{}") * 2]
    if name == "hosts":
        return [b"# two\nnode1 slots=4\n10.0.0.7 slots=3\nuser@node2 slots=1\n"]
    if name == "manifest":
        return [
            b'{"format":"kvstore.server","version":2,"store":0,"server":0,"number":1,"entries":[],"rules":[],'
            b'"slices":{"0":["a",{}]},"files":{"a":"0"},"versions":{"0":1},"rounds":{}}'
        ]
    if name == "keys":
        key = b'"' + b"a" * 40 + b'"'
        return [b'{"public":%b,"secret":%b,"scheduler":%b,"servers":[%b],"allowed":[%b]}' % ((key,) * 5)]
    return [stored(name, folder)]


def stored(name: str, folder: Path) -> bytes:
    store = kv.create()
    store.init(["a", "b"], [np.ones(3, np.float32), np.ones((2, 5), np.float16)])
    path = folder / "good"
    if name == "values":
        store.save(path)
        return path.read_bytes()
    store.set_optimizer(kv.optimizer.Adam(lr_scheduler=kv.lr_scheduler.FactorScheduler(5, 0.9)))
    store.push("a", np.ones(3, np.float32))
    if name == "states":
        store.save_optimizer_states(path, dump_optimizer=True)
        return path.read_bytes()
    with kv.CheckpointManager(folder / "checkpoints") as manager:
        manager.save(store, 1)
    return next(path for path in (folder / "checkpoints").rglob("*") if path.is_file()).read_bytes()


def unpacked(data: bytes) -> object:
    try:
        return journal_file.decode_records(data)
    except ValueError as error:  # which is what it says it raises
        return error


def readers(folder: Path) -> dict[str, Read]:
    store = kv.create()
    store.init("a", np.zeros(3, np.float32))
    return {
        "frames": lambda data: JOB.decode([data]),
        "journal": unpacked,
        "keys": lambda data: JobKeys.from_json(atomic_files.with_checksum(data)),
        "hosts": of_file(folder, lambda path: host_list.of_file(str(path))),
        "manifest": manifest(folder),
        "values": of_file(folder, store.load),
        "states": of_file(folder, states.read_states),
        "checkpoint": of_file(folder, lambda path: contents.read_checkpoint(str(path))),
    }


def main() -> None:
    name, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "seeds").mkdir()
        for number, content in enumerate(seeds(name, folder)):
            (folder / "seeds" / str(number)).write_bytes(content)
        read = readers(folder)[name]

        def one(data: bytes) -> None:
            with contextlib.suppress(kv.KVStoreError):
                read(data)

        atheris.Setup([sys.argv[0], *options, str(folder / "seeds")], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
