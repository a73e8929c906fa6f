"""Objects that say they are arrays and are none: each call ends with an error, and the key stays as it was.

An object that lies about an address is believed, by NumPy too: it is code of this process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvstore as kv

F = np.float32


class Interface:
    def __init__(self, interface: Any) -> None:
        self.__array_interface__ = interface


class Capsule:
    def __init__(self, capsule: Any, device: Any = (1, 0)) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack_device__(self) -> Any:
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        if isinstance(self.capsule, Exception):
            raise self.capsule
        return self.capsule


def interface(**change: Any) -> Interface:
    return Interface({"shape": (3,), "typestr": "<f4", "data": bytes(12), "version": 3, **change})


def consumed() -> Any:
    capsule = np.ones(3, F).__dlpack__()
    np.from_dlpack(Capsule(capsule))  # type: ignore[arg-type]
    return capsule


HOSTILE = {
    "negative shape": interface(shape=(-1,)),
    "objects": interface(typestr="|O8", data=bytes(24)),
    "no such type": interface(typestr="zzz"),
    "an empty interface": Interface({}),
    "an interface that is text": Interface("x"),
    "no capsule": Capsule(object()),
    "nothing": Capsule(None),
    "a number": Capsule(5),
    "a capsule that was used": Capsule(consumed()),
    "an error": Capsule(ValueError("no")),
    "no such device": Capsule(np.ones(3, F).__dlpack__(), (99, 0)),
    "a device that is text": Capsule(np.ones(3, F).__dlpack__(), "x"),
    "a device that is nothing": Capsule(np.ones(3, F).__dlpack__(), None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_array(name: str) -> None:
    with kv.create() as store:
        store.init("w", np.ones(3, F))
        for call in (
            lambda value: store.push("w", value),
            lambda value: store.pull("w", out=value),
            lambda value: store.init("v", value),
        ):
            with pytest.raises(kv.KVStoreError, match=r"key '[wv]'"):
                call(HOSTILE[name])
        assert store.keys() == ["w"]
        assert store.view("w").tolist() == [1, 1, 1]
