"""The table of `kvstore.jax`: see `outcomes`."""

from __future__ import annotations

from .outcomes import Door, Outcome, Refused

ROWS = {
    "Chains of optax": {
        "sgd": "`chain(all_reduce(store), sgd)`",
        "adamw_and_schedule": "adamw with a schedule",
        "clip_after": "`clip_by_global_norm` after the exchange, adam",
        "clip_before": "`clip_by_global_norm` before the exchange: each worker clips its own gradient",
        "multi_steps": "`MultiSteps` after the exchange",
        "multi_steps_around": "`MultiSteps` around the exchange",
        "not_finite_on_one": "`apply_if_finite` after the exchange; infinite gradients on one worker",
        "not_finite_on_one_around": "`apply_if_finite` around the exchange; infinite gradients on one worker",
        "not_finite_on_all_around": "the same; infinite gradients on all workers",
        "masked": "frozen parameters (`multi_transform`)",
        "masked_exchange": "`optax.masked` around the exchange",
        "two_models": "two models in one store",
    },
    "Types and trees": {
        "bfloat16": "bfloat16 parameters",
        "float16_means": "means in float16 whose sums overflow",
        "integer_means": "means of integers",
        "complex_numbers": "complex gradients",
        "trees_differ": "a gradient of another shape on each worker",
    },
    "Loops": {
        "by_hand": "`pushpull(average=True)` between a compiled gradient and a compiled update",
        "scanned": "all steps in one `lax.scan`",
        "donated": "a compiled step with donated buffers",
        "in_the_store": "the store has the optimizer (`pushpull` returns weights)",
        "skipped_by_all": "all workers skip a step",
        "skipped_by_one": "one worker skips a step",
    },
}
WAYS = {
    f"{name}/{how}": {"kind": "jax", "store": store, "hosts": hosts, "jit": how == "inside"}
    for name, store, hosts in (
        ("shared", "shared", False),
        ("dist_sync", "dist_sync", False),
        ("hosts", "dist_sync", True),
    )
    for how in ("outside", "inside")
}
COLUMNS = {"shared": "shared/*", "dist_sync": "dist_sync/*", "dist_sync, by hosts": "hosts/*"}
_LEFT = "has closed its store and takes no part in the exchange"
_SKIPPED = Refused(_LEFT, by_all=False)
EXCEPTIONS: dict[str, dict[str, Outcome]] = {
    "not_finite_on_one_around": {"*": _SKIPPED},
    "integer_means": {"*": Refused("the mean of integers is no integer")},
    "complex_numbers": {"*": Refused("has element type complex64")},
    "trees_differ": {
        "*": Refused(
            "has shape (3,) ... and (4,) on worker 1", "has shape (4,), the key has (3,)", by_all=False
        )
    },
    "skipped_by_one": {"*": _SKIPPED},
}
DOOR = Door("JAX", "conformance.jax_crew", WAYS, COLUMNS, ROWS, EXCEPTIONS)
