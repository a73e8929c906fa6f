import jax
import jax.numpy as jnp

import kvstore as kv
from kvstore.jax import broadcast, pushpull

gradient = jax.jit(jax.grad(lambda w, x: jnp.mean((x @ w - x.sum(axis=1)) ** 2)))

with kv.create("dist_sync") as store:
    images = jax.random.normal(jax.random.key(store.rank), (64, 4))
    params = broadcast(store, {"w": jnp.zeros(4)})
    store.set_optimizer(kv.optimizer.Adam(learning_rate=0.1, rescale_grad=1 / store.num_workers))
    for _ in range(200):
        params = pushpull(store, {"w": gradient(params["w"], images)})  # gradients there, weights back
    assert abs(params["w"] - 1).max() < 0.01
    print(f"worker {store.rank} of {store.num_workers} has learned")
