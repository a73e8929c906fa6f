import jax
import jax.numpy as jnp
import optax

import kvstore as kv
from kvstore.jax import all_reduce, broadcast


@jax.jit
def loss_and_gradient(params, images, labels):
    def loss(params):
        return jnp.mean((images @ params["w"] + params["b"] - labels) ** 2)

    return jax.value_and_grad(loss)(params)


with kv.create("shared") as store:
    images = jax.random.normal(jax.random.key(store.rank), (64, 4))  # each worker has images of its own
    params = broadcast(store, {"w": jnp.zeros(4), "b": jnp.zeros(())})  # rank 0's weights are everyone's
    chain = optax.chain(all_reduce(store), optax.sgd(0.1, momentum=0.9))
    state = chain.init(params)
    for _ in range(100):
        loss, gradient = loss_and_gradient(params, images, images.sum(axis=1))
        updates, state = chain.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    assert loss < 1e-3
    print(f"worker {store.rank} of {store.num_workers} has learned: {loss:.6f}")
