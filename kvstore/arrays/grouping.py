"""Keys and values of callers, as lists of (key, arrays).

A key is an int or a str, or a list of keys nested to any depth, together with a list of values of the same
structure. A key can occur several times; its values are then grouped, in the given order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ..errors import ArrayError, KeyKindError, ShapeError
from .sparse import RowSparseArray

Key = int | str
Group = tuple[Key, list[Any]]

_INT64 = 2**63


def group_values(key: Any, value: Any, what: str = "value") -> list[Group]:
    """Group values by key, each key once, in the order of first appearance.

    Parameters
    ----------
    key : int, str, or list of keys
    value : array, list of arrays, or a list for each list of keys
    what : str
        Name of the values in errors.

    Raises
    ------
    KeyKindError
        A key is neither int nor str, or both kinds occur in one call.
    ShapeError
        A list of keys has a list of values of another length.
    """
    if type(key) is str or type(key) is int:
        return [(_in_range(key), _array_list(value))]
    if not isinstance(key, (list, tuple)):
        return [(plain_key(key), _array_list(value))]
    groups: dict[Key, list[Any]] = {}
    for name, arrays in _key_values(key, value, what):
        known = groups.get(name)
        if known is None:
            groups[name] = arrays
        else:
            known += arrays
    if len({type(key) for key in groups}) > 1:
        raise KeyKindError("int and str keys in one call; a store uses one kind of key")
    return list(groups.items())


def bytes_of(values: Any) -> int:
    """Return the size in bytes of an array, or of all arrays in nested lists.

    For a table, that of its rows.
    """
    if isinstance(values, (list, tuple)):
        return sum(map(bytes_of, values))
    return int(getattr(values.data if isinstance(values, RowSparseArray) else values, "nbytes", 0))


def plain_key(key: Any) -> Key:
    """Return `key` as int or str. Raises KeyKindError for anything else, bool included."""
    if isinstance(key, (bool, np.bool_)):
        raise KeyKindError(f"a key must be an int or a str, not the bool {key}")
    if isinstance(key, (int, np.integer)):
        return _in_range(int(key))
    if isinstance(key, str):
        return str.__str__(key)  # the text of the key, also if a subclass (an Enum) prints another
    raise KeyKindError(f"a key must be an int or a str, not {type(key).__name__}: {key!r}")


def check_text(key: Key) -> None:
    """Raise KeyKindError for a str key that can be neither saved nor sent."""
    if isinstance(key, str) and not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise KeyKindError(
                f"key {key!r} has half of a surrogate pair, which neither a file nor a message can hold "
                f"({error.reason} at position {error.start}): give the key another name"
            ) from None


def key_kind_error(key: Key, there: type) -> KeyKindError:
    """Make the error for a key that is not of the kind of the store's keys."""
    here = "a str" if isinstance(key, str) else "an int"
    return KeyKindError(f"key {key!r} is {here} key, this store has {there.__name__} keys")


def _in_range(key: Key) -> Key:
    if type(key) is int and not -_INT64 <= key < _INT64:
        raise KeyKindError(f"an int key must fit 64 bits, this one needs {key.bit_length() + 1}")
    return key


def _array_list(value: Any) -> list[Any]:
    """Return a new list: another thread could change the caller's list while a kernel reads the arrays."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _key_values(keys: Any, values: Any, what: str) -> Iterable[Group]:
    open_ = [(keys, _zip_values(keys, values, what))]  # the lists that contain the next key, outermost first
    around = {id(keys)}
    while open_:
        inside, pairs = open_[-1]
        for key, value in pairs:
            if type(key) is str or type(key) is int:
                yield _in_range(key), _array_list(value)
            elif not isinstance(key, (list, tuple)):
                yield plain_key(key), _array_list(value)
            elif id(key) in around:
                raise KeyKindError("a list of keys contains itself; a key must be an int or a str")
            else:
                open_.append((key, _zip_values(key, value, what)))
                around.add(id(key))
                break
        else:
            open_.pop()
            around.remove(id(inside))


def _zip_values(keys: Any, values: Any, what: str) -> Iterator[tuple[Any, Any]]:
    if not isinstance(values, (list, tuple)):
        raise ShapeError(f"{len(keys)} keys need a list of as many {what}s, got {type(values).__name__}")
    if len(keys) != len(values):
        raise ShapeError(f"{len(keys)} keys with {len(values)} {what}s; they must be as many")
    return zip(keys, values)  # noqa: B905 - lengths are checked above


def pair_rows(key: Any, out: Any, row_ids: Any) -> list[tuple[Key, list[tuple[RowSparseArray, Any]]]]:
    """Pair each out with its row ids."""
    if out is None or row_ids is None:
        raise ArrayError("row_sparse_pull needs both `out` and `row_ids`")
    wanted = []
    for (name, outs), (_, ids) in zip(
        group_values(key, out, "out"), group_values(key, row_ids, "row_id"), strict=True
    ):
        if all(isinstance(one, (int, float, np.number)) for one in ids):
            ids = [ids]  # plain numbers are one list of ids, not several arrays
        for one in outs:
            if not isinstance(one, RowSparseArray):
                raise ArrayError(f"out of key {name!r} must be a RowSparseArray, not {type(one).__name__}")
        if len(ids) == 1:
            ids = ids * len(outs)
        if len(ids) != len(outs):
            raise ShapeError(
                f"key {name!r}: {len(outs)} outs with {len(ids)} row_ids; give one for each, or one for all"
            )
        wanted.append((name, list(zip(outs, ids, strict=True))))
    return wanted
