"""The table of `kvstore.torch`: see `outcomes`."""

from __future__ import annotations

from typing import Any

from .outcomes import Door, Inapplicable, Outcome, Refused, Right, Unnoticed, Warned

_OVERLAPS = {"default": None, "on": True, "off": False}


def _ways() -> dict[str, dict[str, Any]]:
    ways: dict[str, dict[str, Any]] = {
        "ddp": {"kind": "ddp"},
        "hook": {"kind": "hook", "store": "shared", "overlap": None},
    }
    stores = {"shared": ("shared", False), "dist_sync": ("dist_sync", False), "hosts": ("dist_sync", True)}
    for name, (store, hosts) in stores.items():
        common = {"store": store, "hosts": hosts}
        for overlap, value in _OVERLAPS.items():
            ways[f"{name}/{overlap}"] = {"kind": "optimizer", "overlap": value, **common}
        ways[f"{name}/store"] = {"kind": "store", "overlap": None, **common}
    return ways


ROWS = {
    "Loops": {
        "plain": "zero_grad, forward, backward, step",
        "zero_grad_to_zeros": "`zero_grad(set_to_none=False)`",
        "zero_grad_of_the_model": "`model.zero_grad()` instead of the optimizer's",
        "gradients_set_to_none": "`p.grad = None` instead of zero_grad",
        "zero_grad_after_the_step": "zero_grad after step",
        "zero_grad_after_the_forward": "zero_grad between forward and backward",
        "no_zero_grad": "no zero_grad: gradients add up from step to step",
        "two_steps_of_one_gradient": "two steps after one backward pass",
        "steps_without_gradients": "a step without a backward pass, before the first and after the last",
        "two_losses": "two losses, each with a forward and a backward pass, in one step",
        "two_forwards_one_backward": "two forward passes, one backward pass",
        "retained_graph": "two backward passes of one forward pass (`retain_graph=True`)",
        "gradient_penalty": "a gradient penalty (`autograd.grad(create_graph=True)` in the loss)",
        "autograd_grad_by_hand": "`autograd.grad`, and `.grad` written by the program, without backward",
        "create_graph": "`backward(create_graph=True)`",
        "gradients_read": "gradients are read between backward and step",
        "evaluated_between": "forward passes without backward, in train and eval mode",
        "synchronized_by_hand": "`optimizer.synchronize()`, clip, step",
        "loader_with_processes": "a DataLoader with processes of its own",
        "copied_model": "a deep copy of the model as teacher",
    },
    "Gradients that the program changes": {
        "clip_norm": "`clip_grad_norm_`",
        "clip_value": "`clip_grad_value_`",
        "clamp_data": "`p.grad.data.clamp_`",
        "noise": "noise added to `.grad`",
        "other_tensor": "`.grad` is replaced by another tensor",
        "some_dropped": "`.grad = None` for some parameters",
        "tensor_hook": "a hook on a parameter clips its gradient (`register_hook`)",
        "tensor_hook_added_later": "the same, registered after the optimizer was created",
        "post_accumulate_hook": "`register_post_accumulate_grad_hook` changes `.grad`",
        "post_accumulate_hook_added_later": "the same, registered after the optimizer was created",
        "backward_hook_of_a_module": "`register_full_backward_hook` changes the gradient of a module",
    },
    "GradScaler and autocast": {
        "scaler": "GradScaler",
        "scaler_and_clip": "GradScaler, `unscale_`, clip_grad_norm_",
        "scaler_fused_sgd": "GradScaler, SGD(fused=True)",
        "scaler_fused_adam": "GradScaler, Adam(fused=True)",
        "scaler_fused_and_clip": "GradScaler, `unscale_`, clip_grad_norm_, SGD(fused=True)",
        "overflow_on_one": "GradScaler; an overflow on one worker",
        "overflow_on_one_fused": "the same, SGD(fused=True)",
        "overflow_on_one_and_clip": "the same, `unscale_` and clip_grad_norm_",
        "autocast": "autocast to bfloat16",
        "autocast_scaler_and_clip": "autocast, GradScaler, `unscale_`, clip_grad_norm_",
    },
    "Several passes for a step": {
        "passes_without_a_word": "three passes, then step",
        "no_sync": "`no_sync()` for all passes but the last",
        "no_sync_with_other_parameters": "the pass in `no_sync()` uses parameters that the last one does not",
        "passes_per_step": "`backward_passes_per_step=2`",
        "passes_per_step_and_fewer": "the same, one step with one pass",
        "passes_per_step_and_more": "the same, three passes for a step",
        "sums": "`average=False`",
        "sums_of_two_passes": "`average=False`, two passes for a step",
        "sums_of_passes_per_step": "`average=False`, `backward_passes_per_step=2`",
        "whole_steps": "`whole_steps=True`",
        "whole_steps_and_passes": "`whole_steps=True`, two passes for a step",
    },
    "Models": {
        "gradients_that_are_none": "`.grad is None` where no worker has a gradient",
        "unused_by_all": "a parameter that no worker uses, with weight decay",
        "unused_by_one": "a parameter that one worker does not use",
        "unused_by_each_another": "each worker uses other parameters",
        "unused_by_step": "other parameters in each step, on each worker",
        "used_in_another_order": "workers use the parameters in different orders",
        "tied": "tied weights, and a layer that is used twice",
        "empty_and_scalar": "parameters without elements, and without dimensions",
        "frozen": "frozen parameters",
        "frozen_in_the_middle": "parameters frozen while training",
        "unfrozen_in_the_middle": "parameters unfrozen while training",
        "unfrozen_by_a_group": "the same, with `add_param_group`",
        "sparse": "`nn.Embedding(sparse=True)`",
        "sparse_without_a_word": "the same, not named in `sparse`",
        "types": "float32 and float64 parameters in one model",
        "half_types": "float16, bfloat16, float32 and float64 parameters in one model",
        "complex_numbers": "complex parameters",
        "channels_last": "convolutions in channels_last",
        "strided": "a transposed parameter",
        "lazy": "a lazy layer without a shape",
        "batch_norm": "BatchNorm; each worker normalizes its own batch",
        "weight_norm": "`parametrizations.weight_norm`",
        "reversed_names": "named_parameters in reverse order",
        "many_parameters": "120 parameters, clipped",
        "checkpointed": "checkpointing",
        "checkpointed_twice": "checkpointing, a layer used twice",
        "checkpointed_reentrant": "reentrant checkpointing",
        "checkpointed_reentrant_twice": "reentrant checkpointing, a layer used twice",
        "checkpointed_reentrant_and_clipped": "reentrant checkpointing, clip_grad_norm_",
        "compiled": "`torch.compile`, clip_grad_norm_",
    },
    "Optimizers": {
        "adam": "Adam",
        "kinds": "Adadelta, Adagrad, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop",
        "foreach": "SGD, Adam, AdamW with foreach=True",
        "fused": "SGD, Adam, AdamW, Adagrad with fused=True",
        "tensor_rate": "Adam with a tensor as learning rate",
        "variants": "nesterov, maximize, amsgrad, AdamW",
        "named_groups": "an optimizer of `model.named_parameters()`",
        "groups": "parameter groups",
        "two_optimizers": "two optimizers for one model",
        "two_optimizers_in_turn": "the same; each makes every second step",
        "gan": "a GAN: two models, two optimizers",
        "gan_by_models": "the same, zero_grad of the models",
        "gan_without_detach": "the same, and the discriminator's loss reaches the generator",
        "gan_with_requires_grad": "the same, the model that does not learn is frozen",
        "models_of_one_store": "two models in one store",
        "closure": "SGD with a closure that clips",
        "lbfgs": "LBFGS",
        "step_schedule": "StepLR",
        "one_cycle": "OneCycleLR",
        "plateau": "ReduceLROnPlateau",
        "rate_by_hand": "`param_groups[0]['lr']` set by the program",
        "resumed": "state_dict of model and optimizer, loaded into new ones",
        "loaded_between": "load_state_dict while training",
        "step_hooks": "`register_step_pre_hook` changes gradients; a post hook",
        "ema": "AveragedModel",
        "attributes_of_the_wrapper": "`grad_scale` and `found_inf` set on the optimizer",
    },
    "Steps that differ or fail": {
        "skipped_by_all": "all workers skip a step after backward; zero_grad",
        "skipped_by_all_with_the_models_zero_grad": "the same; `model.zero_grad()`",
        "skipped_by_one": "one worker skips a step after backward; zero_grad",
        "skipped_by_one_with_the_models_zero_grad": "the same; `model.zero_grad()`",
        "pass_skipped_by_one": "one worker leaves out a step, with its backward pass",
        "pass_skipped_by_each_once": "each worker leaves out another step",
        "step_without_pass_on_one": "one worker has no batch, and calls step",
        "more_batches_on_one": "one worker has one batch more (`join` with DDP)",
        "exception_before_the_step": "an exception between backward and step on all workers; zero_grad",
        "exception_in_the_pass": "an exception in the backward pass of all workers; zero_grad",
        "exception_in_the_pass_of_one": "an exception in the backward pass of one worker",
        "rate_differs": "another learning rate on each worker",
        "rate_differs_later": "the same, from the third step on",
        "weights_differ_later": "one worker changes a weight",
        "models_differ": "a layer of another size on each worker",
        "frozen_on_one": "a layer is frozen on one worker",
    },
}
COLUMNS = {
    "DDP, gloo": "ddp",
    "DDP with our hook": "hook",
    "shared": "shared/[do]*",
    "dist_sync": "dist_sync/[do]*",
    "dist_sync, by hosts": "hosts/[do]*",
    "update_on_kvstore": "*/store",
}

#: Patterns: DistributedOptimizer that averages gradients; the two ways with DistributedDataParallel.
_AVERAGES = "*/default */on */off"
_DDP = "ddp hook"

_HIDDEN = Refused(
    "with update_on_kvstore the store updates the weights with the gradients of this worker, so they can be "
    "neither changed nor read"
)
_TWICE = "got another gradient while the store updates the weights with the gradients of the pass before"
_ZEROED = "zero_grad while the store updates the weights with the gradients of the pass before"
_STEPS = Refused(
    "the workers have completed different numbers of steps (...), so gradients of different "
    "steps were averaged"
)
_ONE_RULE = Refused("store already has an optimizer, which would use gradients as updates")
_OF_THE_STORE = Inapplicable(
    "the store has one optimizer for all parameters, of those in `kvstore.optimizer`"
)
_ZEROS = Warned(
    "If no worker has a gradient, the store updates the weight with zeros: weight decay and momentum "
    "change it"
)
_CLOSED = ("Connection closed by peer", "reset by peer")
_NOT_SEEN = Unnoticed(
    "DistributedDataParallel averages gradients; it sees neither steps nor settings nor weights"
)
_NO_OPTION = Inapplicable("an option or a method of `DistributedOptimizer`")
_FIXED = Inapplicable("DistributedDataParallel has the parameters that need gradients when it is created")
_LEFT = "has closed its store and takes no part in the exchange"
_FROZEN = "exchanges the gradients of other parameters than worker 0"

_IS_HIDDEN = [
    "create_graph", "gradients_read", "synchronized_by_hand", "clip_norm", "clip_value", "clamp_data",
    "noise", "other_tensor", "scaler", "scaler_and_clip", "scaler_fused_sgd", "scaler_fused_adam",
    "scaler_fused_and_clip", "overflow_on_one", "overflow_on_one_fused", "overflow_on_one_and_clip",
    "autocast_scaler_and_clip", "checkpointed_reentrant_and_clipped", "compiled", "many_parameters",
    "closure", "step_hooks",
]  # fmt: skip
_HAS_OTHER_RULES = [
    "kinds", "foreach", "fused", "variants", "groups", "lbfgs", "attributes_of_the_wrapper",
]  # fmt: skip
_HAS_TWO = [
    "two_optimizers", "two_optimizers_in_turn", "gan", "gan_by_models", "gan_without_detach",
    "gan_with_requires_grad", "models_of_one_store",
]  # fmt: skip
_HAS_OPTIONS = [
    "synchronized_by_hand", "passes_per_step", "passes_per_step_and_fewer", "passes_per_step_and_more",
    "sums", "sums_of_two_passes", "sums_of_passes_per_step", "whole_steps", "whole_steps_and_passes",
    "sparse_without_a_word", "reversed_names",
]  # fmt: skip
_NO_WHOLE_STEPS = Refused(
    "with hierarchy='host' each part of a key is carried by itself; use hierarchy='flat'"
)

_EXCEPTIONS: dict[str, dict[str, Outcome]] = {
    "steps_without_gradients": {"*/store": _ZEROS},
    "two_losses": {"*/store": Refused(_TWICE)},
    "retained_graph": {
        "*/store": Refused(_TWICE),
        _DDP: Unnoticed("DistributedDataParallel averages the first backward pass after a forward pass"),
    },
    "autograd_grad_by_hand": {_DDP: Unnoticed("DistributedDataParallel averages gradients in backward")},
    "create_graph": {
        _DDP: Refused("a leaf Variable that requires grad is being used in an in-place operation")
    },
    "some_dropped": {
        "*/store": Refused("was replaced between backward and step, but with update_on_kvstore the store has")
    },
    "passes_without_a_word": {"*/store": Refused(_TWICE)},
    "passes_per_step_and_more": {"*/store": Refused(_TWICE)},
    "sums_of_two_passes": {
        _AVERAGES: Refused("is a sum over the workers, and would be summed again: with average=False"),
        "*/store": Refused(_TWICE),
    },
    "whole_steps": {"hosts/*": _NO_WHOLE_STEPS},
    "whole_steps_and_passes": {"hosts/*": _NO_WHOLE_STEPS, "*/store": Right()},
    "gradients_that_are_none": {"*/store": Inapplicable("the gradients are those of this worker")},
    "unused_by_all": {"*/store": _ZEROS},
    "unused_by_step": {"*/store": _ZEROS},
    "unfrozen_in_the_middle": {_DDP: _FIXED},
    "unfrozen_by_a_group": {_DDP: _FIXED, "*/store": Refused("an optimizer in the store has one group")},
    "sparse_without_a_word": {
        "*/*": Refused("has a sparse gradient: add it to sparse=[...], on all workers")
    },
    "half_types": {"*/store": Right(0.05), "*": Right(0.02)},
    "complex_numbers": {"hook */*": Refused("is torch.complex64, which stores do not sum")},
    "lazy": {
        "*/*": Refused("has no memory yet: first run a batch through the model"),
        _DDP: Refused("Modules with uninitialized parameters can't be used with `DistributedDataParallel`"),
    },
    "checkpointed_reentrant_twice": {
        "*/default */on": Refused(
            "got another gradient while gradients are being sent: the backward pass computes a gradient "
            "twice (pass overlap=False)"
        ),
        "*/store": Refused(_TWICE),
        _DDP: Refused("Expected to mark a variable ready only once"),
    },
    "adam": {"*/store": Right(1e-3)},
    "tensor_rate": {"*/store": Right(1e-3)},
    "one_cycle": {"*/store": Refused("optimizer must support momentum or beta1 with `cycle_momentum`")},
    "resumed": {"*/store": Refused("the states are in the store: store.save_optimizer_states(path)")},
    "loaded_between": {"*/store": Refused("the states are in the store: store.save_optimizer_states(path)")},
    "skipped_by_all": {"*/store": Refused(_ZEROED)},
    "skipped_by_all_with_the_models_zero_grad": {"*/store": Refused(_TWICE)},
    "skipped_by_one": {_AVERAGES: _STEPS, "*/store": Refused(_ZEROED, _LEFT), _DDP: _NOT_SEEN},
    "skipped_by_one_with_the_models_zero_grad": {
        _AVERAGES: _STEPS,
        "*/store": Refused(_TWICE, _LEFT),
        _DDP: _NOT_SEEN,
    },
    "pass_skipped_by_one": {"ddp": Refused(*_CLOSED, by_all=False), "*": Refused(_LEFT, by_all=False)},
    "pass_skipped_by_each_once": {
        "*": Unnoticed(
            "all workers make equally many steps; which batch belongs to which step no way can know"
        )
    },
    "step_without_pass_on_one": {
        "ddp": Refused(*_CLOSED, by_all=False),
        "hook": Refused(_LEFT, by_all=False),
    },
    "more_batches_on_one": {"*/*": Refused(_LEFT, by_all=False)},
    "exception_before_the_step": {"*/store": Refused(_ZEROED)},
    "exception_in_the_pass": {
        _AVERAGES: Refused("an exception has ended the pass before (call synchronize, on this worker"),
        "*/store": Refused(_ZEROED),
        _DDP: Refused("Expected to have finished reduction in the prior iteration before starting a new one"),
    },
    "exception_in_the_pass_of_one": {
        _AVERAGES: Refused("an exception has ended the pass before (call synchronize, on this worker", _LEFT),
        "*/store": Refused(_ZEROED, _LEFT),
        "ddp": Refused("Expected to have finished reduction in the prior iteration", *_CLOSED),
        "hook": Refused("Expected to have finished reduction in the prior iteration", _LEFT),
    },
    "rate_differs": {
        _AVERAGES: Refused("has other settings than that of worker ..., so their weights would differ"),
        "*/store": Refused("the optimizers of two workers differ", _LEFT),
        _DDP: _NOT_SEEN,
    },
    "rate_differs_later": {
        "*/*": Refused("has other settings than that of worker ..., so their weights would differ"),
        _DDP: _NOT_SEEN,
    },
    "weights_differ_later": {
        _AVERAGES: Refused("differ from those of worker ..., after the same gradients"),
        "*/store": Refused("with update_on_kvstore the store has the weights", _LEFT),
        _DDP: _NOT_SEEN,
    },
    "models_differ": {
        "*/*": Refused("has another model than worker 0", _LEFT),
        _DDP: Refused("appears not to match sizes of the same param in process 0", by_all=False),
    },
    "frozen_on_one": {
        "*/*": Refused(_FROZEN),
        _DDP: Refused("DDP expects same model across all ranks"),
    },
}


def _exceptions() -> dict[str, dict[str, Outcome]]:
    """Return all exceptions: first those of single programs, then those of many."""
    found = {program: dict(by_way) for program, by_way in _EXCEPTIONS.items()}
    many: tuple[tuple[list[str], str, Outcome], ...] = (
        (_IS_HIDDEN, "*/store", _HIDDEN),
        (_HAS_OTHER_RULES, "*/store", _OF_THE_STORE),
        (_HAS_TWO, "*/store", _ONE_RULE),
        (_HAS_OPTIONS, _DDP, _NO_OPTION),
    )
    for programs, pattern, outcome in many:
        for program in programs:
            found.setdefault(program, {}).setdefault(pattern, outcome)
    return found


DOOR = Door("PyTorch", "conformance.crew", _ways(), COLUMNS, ROWS, _exceptions())
