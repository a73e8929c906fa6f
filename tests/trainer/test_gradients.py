"""Gradients of parameters whose grad_req changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvstore as kv
from kvstore.trainer import Parameter, Trainer


@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("name", ["local", "shared"])
def test_a_frozen_parameter_is_trained_after_a_change_of_its_grad_req(name: str, updates: bool) -> None:
    """With the rate of that step, as in Gluon."""
    frozen, free = Parameter("frozen", np.zeros(2), grad_req="null"), Parameter("free", np.zeros(2))
    with kv.create(name) as store:
        trainer = Trainer([frozen, free], "sgd", {"learning_rate": 1}, store, update_on_kvstore=updates)
        free.grad()[:] = 2
        trainer.step(1)
        trainer.set_learning_rate(0.25)
        frozen.grad_req = "write"
        for parameter in (frozen, free):
            parameter.grad()[:] = 2
        trainer.step(1)
        assert frozen.data().tolist() == [-0.5, -0.5]
        assert free.data().tolist() == [-2.5, -2.5]


class Own:
    """A parameter of another library, without a gradient."""

    name, grad_req = "own", "write"

    def list_data(self) -> list[Any]:
        return [np.zeros(2)]

    def list_grad(self) -> list[Any]:
        return []


def test_a_parameter_with_data_and_no_gradient_says_so() -> None:
    with pytest.raises(kv.ArrayError, match="'own' has data and no gradient, and its grad_req is 'write'"):
        Trainer([Own()], "sgd", kvstore=None).step(1)


def test_arrays_of_other_libraries_need_a_gradient_first() -> None:
    class Other:
        __array_interface__ = np.zeros(2).__array_interface__
        shape = (2,)

    parameter = Parameter("p", Other(), grad_req="null")
    parameter.grad_req = "write"
    with pytest.raises(kv.ArgumentError, match="parameter 'p' holds a Other: pass `grad`, call set_grad"):
        parameter.grad()
