"""Objects between workers: the received objects equal the sent ones, and errors name unsendable ones."""

from __future__ import annotations

import datetime
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kvstore as kv
from kvstore.collective.objects import ArrayKind, pack_object, unpack_object

TYPES = st.sampled_from(["?", "i1", "u2", "i4", ">i4", "u8", "f2", "f4", "f8", ">f8", "c8", "c16"])
ARRAYS = TYPES.flatmap(lambda name: hnp.arrays(name, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    TEXTS,
    st.binary(max_size=20),
    ARRAYS,
)
OBJECTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)
)


def assert_same(found: Any, sent: Any) -> None:
    assert type(found) is type(sent)
    if isinstance(sent, dict):
        assert list(found) == list(sent)
        for key, value in sent.items():
            assert_same(found[key], value)
    elif isinstance(sent, list):
        assert len(found) == len(sent)
        for one, other in zip(found, sent, strict=True):
            assert_same(one, other)
    elif isinstance(sent, np.ndarray):
        assert (found.dtype, found.shape) == (sent.dtype.newbyteorder("="), sent.shape)
        assert found.tobytes() == sent.astype(found.dtype).tobytes()
    elif isinstance(sent, float) and math.isnan(sent):
        assert math.isnan(found)
    else:
        assert found == sent


@given(OBJECTS)
def test_a_received_object_equals_the_sent_one(value: Any) -> None:
    assert_same(unpack_object(pack_object(value)), value)


def test_a_tuple_is_a_list_and_an_array_of_no_dimensions_stays_one() -> None:
    assert unpack_object(pack_object((1, (2,)))) == [1, [2]]
    found = unpack_object(pack_object([np.float32(1.5), np.array(2), np.ones(2, ml_dtypes.bfloat16)]))
    assert (type(found[0]), found[0]) == (np.float32, 1.5)
    assert (found[1].shape, found[1][()]) == ((), 2)
    assert (found[2].dtype, found[2].tolist()) == (np.dtype(ml_dtypes.bfloat16), [1, 1])


def test_a_received_object_is_the_receiver_s_own() -> None:
    array = np.zeros((3, 4))[:, ::2]
    found = unpack_object(pack_object(array))
    found[...] = 1
    assert not array.any()


def test_arrays_of_a_framework_are_made_again() -> None:
    class Own:
        pass

    kind = ArrayKind(
        lambda value: np.arange(3) if isinstance(value, Own) else None, lambda array: ("own", array.sum())
    )
    assert unpack_object(pack_object([Own(), np.ones(1)], kind), kind)[0] == ("own", 3)


deep: list[Any] = []
deep.append(deep)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, {"b": object()}]}, r"value\['a'\]\[1\]\['b'\] is of type object: objects can have "),
        ({"a": {3: 1}}, r"value\['a'\] has the key 3 of type int: the keys of a dict must be str"),
        ([2**64], r"value\[0\] is an int of 65 bits"),
        (["\ud800"], r"value\[0\] is '\\ud800', which has half of a surrogate pair"),
        ({"\ud800": 1}, r"a key of value is '\\ud800'"),
        (deep, "more than 100 levels deep, or contains itself"),
        ({1, 2}, "value is of type set"),
        (1j, "value is of type complex"),
        (datetime.date(2020, 1, 1), r"value is of type datetime\.date"),
        ([np.array(["x"])], r"value\[0\] cannot be sent: "),
        ([np.ma.masked_array([1.0], [True])], r"value\[0\] cannot be sent: .*masked"),
        ([kv.RowSparseArray.zeros((3, 1))], r"value\[0\] is of type kvstore\..*RowSparseArray"),
    ],
)  # fmt: skip
def test_what_cannot_be_sent_is_named(value: Any, text: str) -> None:
    with pytest.raises(kv.ArgumentError, match=text):
        pack_object(value)
