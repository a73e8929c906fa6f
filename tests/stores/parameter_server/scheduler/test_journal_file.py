"""The scheduler's journal: whole records or none, after a kill at any time; damage is reported."""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, FencedError, KVStoreError
from kvstore.stores.parameter_server.scheduler.journal_file import JournalFile, decode_records, encode_record

TEXTS = st.lists(
    st.one_of(st.binary(max_size=60), st.just(b"\xa7kvj" * 3), st.just(encode_record(b"inside"))), max_size=5
)


@given(TEXTS, st.data())
def test_a_write_that_was_cut_gives_the_records_before_it(texts: list[bytes], data: st.DataObject) -> None:
    ends, whole = [0], b""
    for text in texts:
        whole += encode_record(text)
        ends.append(len(whole))
    cut = data.draw(st.integers(0, len(whole)))
    count = max(at for at, end in enumerate(ends) if end <= cut)
    tail = whole[ends[count] : cut]
    if b"\xa7kvj" in tail[1:] and any(encode_record(b"inside") in text for text in texts[count : count + 1]):
        return  # a record within a record: no scheduler writes one
    assert decode_records(whole[:cut]) == (texts[:count], ends[count])


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=2, max_size=5), st.data())
def test_damage_before_a_good_record_is_an_error(texts: list[bytes], data: st.DataObject) -> None:
    whole = bytearray(b"".join(map(encode_record, texts)))
    at = data.draw(st.integers(0, len(whole) - len(encode_record(texts[-1])) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match="is damaged"):
        decode_records(bytes(whole))


def test_each_bit_that_flips_is_found_in_the_last_record_too(tmp_path: Path) -> None:
    """A record of which a bit was flipped was taken for half written, and what it said was forgotten."""
    journal = JournalFile(str(tmp_path), "job")
    for text in (b"one", b"two", b"three"):
        journal.append(text)
    journal.close()
    good = journal.path.read_bytes()
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        journal.path.write_bytes(data)
        with pytest.raises(ConfigError, match=rf"record [0-2], at byte .* of {len(good)}, is damaged; its"):
            JournalFile(str(tmp_path), "job")
        assert journal.path.read_bytes() == data


def test_a_journal_of_the_version_before_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / f"scheduler-{hashlib.sha256(b'job').hexdigest()[:16]}.journal"
    path.touch(0o600)
    path.write_bytes(b"\xa7kvj" + struct.pack("<II", 3, zlib.crc32(b"one", zlib.crc32(b"\3\0\0\0"))) + b"one")
    with pytest.raises(ConfigError, match="record 0, at byte 0 of 15, is of an earlier version of kvstore"):
        JournalFile(str(tmp_path), "job")


def test_a_first_record_that_is_cut_is_no_new_job(tmp_path: Path) -> None:
    """It gets its name when it is whole: no kill leaves this."""
    journal = JournalFile(str(tmp_path), "job")
    journal.replace_all(b"the whole state")
    journal.close()
    journal.path.write_bytes(journal.path.read_bytes()[:-3])
    with pytest.raises(ConfigError, match="its first record is cut short"):
        JournalFile(str(tmp_path), "job")


def test_zeros_at_the_end_are_cut_off(tmp_path: Path) -> None:
    journal = JournalFile(str(tmp_path), "job")
    journal.append(b"one")
    journal.close()
    with journal.path.open("ab") as file:
        file.write(bytes(5000))
    again = JournalFile(str(tmp_path), "job")
    assert again.records == [b"one"]
    again.append(b"two")
    again.close()
    last = JournalFile(str(tmp_path), "job")
    assert last.records == [b"one", b"two"]
    last.close()


def test_it_belongs_to_one_process(tmp_path: Path) -> None:
    journal = JournalFile(str(tmp_path), "job")
    with pytest.raises(ConfigError, match="another scheduler of this job has the journal"):
        JournalFile(str(tmp_path), "job")
    JournalFile(str(tmp_path), "another").close()
    journal.close()
    JournalFile(str(tmp_path), "job").close()


def test_a_kill_while_it_is_replaced_leaves_the_old_one(tmp_path: Path) -> None:
    journal = JournalFile(str(tmp_path), "job")
    journal.append(b"one")
    journal.path.with_suffix(".new").write_bytes(encode_record(b"half")[:-2])
    journal.close()
    again = JournalFile(str(tmp_path), "job")
    assert again.records == [b"one"]
    again.replace_all(b"whole")
    again.append(b"more")
    again.close()
    assert [one.name for one in tmp_path.iterdir()] == [journal.path.name]
    last = JournalFile(str(tmp_path), "job")
    assert last.records == [b"whole", b"more"]
    last.remove()
    assert not list(tmp_path.iterdir())


def without_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system whose locks do not reach the other host."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)


def test_where_locks_do_not_reach_the_older_one_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_lock(monkeypatch)
    old = JournalFile(str(tmp_path), "job")
    old.append(b"one")
    new = JournalFile(str(tmp_path), "job")
    seen: list[list[bytes]] = []

    def make(records: list[bytes]) -> bytes:
        seen.append(list(records))
        if len(seen) == 1:
            old.append(b"late")  # before the file is replaced: other processes may know of it
        return b"all of " + b" ".join(records)

    new.replace_by_merged(make)
    assert seen == [[b"one"], [b"one", b"late"]]
    with pytest.raises(FencedError, match="another scheduler of this job has replaced"):
        old.append(b"too late")
    new.append(b"on")
    old.close()
    new.close()
    assert decode_records(new.path.read_bytes())[0] == [b"all of one late", b"on"]


def test_damage_and_strangers_are_told(tmp_path: Path) -> None:
    journal = JournalFile(str(tmp_path), "job")
    journal.append(b"one")
    journal.append(b"two")
    journal.close()
    data = bytearray(journal.path.read_bytes())
    data[14] ^= 1
    journal.path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"record 0, at byte 0 of 46, is damaged"):
        JournalFile(str(tmp_path), "job")
    journal.path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        JournalFile(str(tmp_path), "job")
    with pytest.raises(ConfigError, match="cannot be used: File exists"):
        JournalFile(str(journal.path), "job")
    with pytest.raises(ConfigError, match="give it a port"):
        JournalFile(str(tmp_path), "")


def test_what_cannot_be_written_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = JournalFile(str(tmp_path), "job")
    journal.append(b"one")

    def full(file: int, data: bytes) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(KVStoreError, match="No space left"):
        journal.append(b"two")
    with pytest.raises(KVStoreError, match="No space left"):
        journal.replace_all(b"two")
    journal.close()
