"""The table of `kvstore.trainer`: see `outcomes`."""

from __future__ import annotations

from .outcomes import Door, Outcome, Refused, Right

ROWS = {
    "Trainer": {
        "sgd": "step, SGD with momentum and weight decay",
        "adam": "Adam",
        "clipped_by_the_rule": "`clip_gradient` of the optimizer",
        "tensors_of_torch": "weights and gradients of PyTorch",
        "float16": "float16 weights with `multi_precision`",
        "clipped_between": "`allreduce_grads`, clip by the norm of all gradients, `update`",
        "batch_sizes": "a smaller last batch",
        "rate_changes": "`set_learning_rate`",
        "factors": "`lr_mult` and `wd_mult` changed while training",
        "frozen": "`grad_req='null'`",
        "states": "`save_states`, `load_states`",
        "rows": "row-sparse gradients",
        "stale_on_all": "a gradient that was not written since the last step",
        "stale_on_one": "the same on one worker, `ignore_stale_grad=True`",
        "skipped_by_all": "all workers skip a step",
        "skipped_by_one": "one worker skips a step",
        "rate_differs": "another learning rate on each worker",
        "shapes_differ": "a parameter of another shape on each worker",
    }
}
WAYS = {
    f"{name}/{how}": {"kind": "trainer", "store": store, "hosts": hosts, "updates": how == "store"}
    for name, store, hosts in (
        ("shared", "shared", False),
        ("dist_sync", "dist_sync", False),
        ("hosts", "dist_sync", True),
    )
    for how in ("trainer", "store")
}
COLUMNS = {
    "shared": "shared/trainer",
    "dist_sync": "dist_sync/trainer",
    "dist_sync, by hosts": "hosts/trainer",
    "update_on_kvstore": "*/store",
}
_LEFT = "has closed its store and takes no part in the exchange"
EXCEPTIONS: dict[str, dict[str, Outcome]] = {
    "float16": {"*": Right(5e-3)},  # float16 has 11 bits
    "clipped_between": {"*/store": Refused("allreduce_grads: the store ... updates the weights")},
    "stale_on_all": {"*": Refused("was not written since the last step; if not every batch uses it")},
    "skipped_by_one": {"*": Refused(_LEFT, by_all=False)},
    "rate_differs": {
        "*/trainer": Refused("has other settings than that of worker ..., so their weights would differ"),
        "*/store": Refused("the optimizers of two workers differ", _LEFT),
    },
    "shapes_differ": {"*": Refused("key 0 has shape (2, 3) ... and (2, 4) on worker 1", _LEFT)},
}
DOOR = Door("Trainer", "conformance.trainer_crew", WAYS, COLUMNS, ROWS, EXCEPTIONS)
