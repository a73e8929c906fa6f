"""The body of a worker that plays one program after the other, as the test says."""

from __future__ import annotations

import json
import os
import traceback
import warnings
from typing import Any

import jobs
import torch
import torch._dynamo

from . import accumulation, faults, gradient_changes, loops, models, optimizers
from .played import Way, played

PROGRAMS = {
    program.__name__: program
    for part in (loops, gradient_changes, accumulation, models, optimizers, faults)
    for program in part.PROGRAMS
}


def _warm_up() -> None:
    """Import what the first optimizer and the first compiled model import, before workers are forked."""
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    torch.compile(layer, backend="aot_eager")(torch.ones(1, 1)).sum().backward()
    optimizer.step()


_warm_up()


def play_all(way: Way, size: int, folder: str) -> str:
    """Play the programs that the test names, until it says that there are no more."""
    torch.set_num_threads(1)
    while (name := jobs.hear(3600)) != "end":
        jobs.tell(f"{name} " + json.dumps(_attempt(name, way, size, folder)))
    return "ended"


def _attempt(name: str, way: Way, size: int, folder: str) -> Any:
    """Return the numbers of a program, or the error that refused it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with_error: dict[str, Any] = {}
    try:
        with played(way, size, name, folder) as play:
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    numbers = PROGRAMS[name](play)
                return {"found": numbers, "warned": sorted({str(one.message) for one in caught})}
            except Exception as error:
                if os.environ.get("CONFORMANCE_TRACES"):
                    traceback.print_exc()
                with_error = {"error": f"{type(error).__name__}: {error}"}
                traceback.clear_frames(error.__traceback__)
    except Exception as error:  # of the end of a play that was refused
        with_error = with_error or {"error": f"{type(error).__name__}: {error}"}
    return with_error
