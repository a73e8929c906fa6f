"""Arrays of JAX in the core stores, in workers; tests/arrays/test_jax_arrays.py starts them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import kvstore as kv
import kvstore.arrays.host

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

TYPES = ("bfloat16", "float16", "float32", "int8", "uint8", "int32")


def values(store_name: str) -> None:
    """Use arrays of each type as values; on one device, on two, and parts of tables."""
    import jax.numpy as jnp

    with kv.create(store_name) as store:
        size = store.num_workers
        for dtype in TYPES:
            for shape in ((2, 3), (), (0,), (3, 0)):
                count = int(np.prod(shape))
                array = jnp.arange(count).reshape(shape).astype(dtype)
                key, wanted = f"{dtype}{shape}", np.arange(count).reshape(shape)
                _check(store, key, array, wanted, size)
        for name, array in _on_two_devices().items():
            _check(store, name, array, np.arange(6), size)
        table = kv.RowSparseArray(jnp.ones((2, 2), "bfloat16"), jnp.array([4, 1]), (6, 2))
        store.init("t", kv.RowSparseArray.from_dense(jnp.ones((6, 2), "bfloat16")))
        store.push("t", table)
        out = kv.RowSparseArray.zeros((6, 2), table.dtype)
        store.row_sparse_pull("t", out=out, row_ids=jnp.array([4, 0]))
        assert out.data.tolist()[-1] == [size, size]
        store.barrier()


def _check(store: kv.KVStore, key: str, array: Any, wanted: Any, size: int) -> None:
    store.init(key, array)
    out = np.full(wanted.shape, 9.0)
    store.pull(key, out=out)
    np.testing.assert_array_equal(out, wanted)
    same = np.empty(wanted.shape, array.dtype)
    store.pushpull(key, [array, array], out=[out, same])
    np.testing.assert_array_equal(out, 2 * size * wanted)
    np.testing.assert_array_equal(same.astype(float), 2 * size * wanted)
    np.testing.assert_array_equal(np.asarray(array).astype(float), wanted)


def _on_two_devices() -> dict[str, Any]:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("n",))
    assert len(jax.devices()) == 2
    return {
        name: jax.device_put(jax.numpy.arange(6.0), NamedSharding(mesh, PartitionSpec(*parts)))
        for name, parts in (("sharded", ("n",)), ("replicated", ()))
    }


def memory_is_shared() -> None:
    """View arrays of JAX without a copy."""
    import jax.numpy as jnp

    for dtype in TYPES:
        array = jnp.arange(100).astype(dtype)
        view = kvstore.arrays.host.readable_array(array)
        assert view.ctypes.data == array.unsafe_buffer_pointer(), dtype
        assert view.dtype.name == dtype


def refused(store_name: str) -> dict[str, list[str]]:
    """Return the errors for arrays without a value, of other types, and for outs."""
    with kv.create(store_name) as store:
        store.init("w", np.ones(3, np.float32))
        found = _refused(store)
        out = np.empty(3, np.float32)
        store.pull("w", out=out)
        assert (store.keys(), out.tolist()) == (["w"], [1, 1, 1])
        store.barrier()
        return found


def _refused(store: kv.KVStore) -> dict[str, list[str]]:
    import jax
    import jax.numpy as jnp

    import kvstore.jax

    donated, deleted = jnp.ones(3), jnp.ones(3, "bfloat16")
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated).block_until_ready()
    deleted.delete()
    gone = {"donated": donated, "deleted": deleted}
    odd = {name: jnp.ones(3).astype(name) for name in ("int4", "uint4", "float8_e4m3fn", "bool", "complex64")}
    found = {name: _values(store, array) + _outs(store, array) for name, array in (gone | odd).items()}
    for name, array in gone.items():
        found[f"door {name}"] = [_error(lambda array=array: kvstore.jax.pushpull(store, {"p": array}))]
    for dtype in ("float32", "bfloat16"):
        found[f"out {dtype}"] = _outs(store, jnp.ones(3, dtype))
    found["key"] = _values(store, jax.random.key(0))
    for name, run in (("jit", jax.jit), ("grad", jax.grad), ("vmap", jax.vmap)):
        found[name] = _traced(store, run)
    return found


def _traced(store: kv.KVStore, run: Callable[[Any], Any]) -> list[str]:
    import jax.numpy as jnp

    errors = []

    def use(array: Any) -> Any:
        errors.extend(_values(store, array))
        return array.sum()

    run(use)(jnp.ones((2, 3)) if "vmap" in run.__name__ else jnp.ones(3))
    return errors


def _values(store: kv.KVStore, array: Any) -> list[str]:
    return [
        _error(lambda: store.init("new", array)),
        _error(lambda: store.push("w", array)),
        _error(lambda: store.push("w", [np.ones(3, np.float32), array])),
        _error(lambda: kv.RowSparseArray(array, [0, 1, 2], (3,))),
    ]


def _outs(store: kv.KVStore, array: Any) -> list[str]:
    return [
        _error(lambda: store.pull("w", out=array)),
        _error(lambda: store.pushpull("w", np.ones(3, np.float32), out=array)),
    ]


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except kv.KVStoreError as error:
        return str(error)
    return "no error"
