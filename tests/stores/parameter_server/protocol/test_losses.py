"""The texts about processes that are lost."""

from __future__ import annotations

import pytest

from kvstore.stores.parameter_server.protocol.losses import loss_failure
from kvstore.stores.parameter_server.protocol.messages import Loss

WORKER, SERVER, OTHER = Loss("worker", 1, 6.0), Loss("server", 0, 6.0), Loss("server", 1, 6.0)
OTHERS = "values on other servers can still be read"
ALL = "; values can still be read"
NONE = "; start the job again, from what was saved last"


@pytest.mark.parametrize(
    ("losses", "servers", "says"),
    [
        ([WORKER], 1, ALL),
        ([SERVER], 1, NONE),
        ([SERVER], 2, OTHERS),
        ([SERVER, OTHER], 2, NONE),
        ([WORKER, SERVER], 1, NONE),
        ([WORKER, SERVER], 2, OTHERS),
        ([Loss("scheduler", 0, 6.0)], 2, NONE),
    ],
)
def test_what_can_still_be_read(losses: list[Loss], servers: int, says: str) -> None:
    failure = loss_failure(losses, servers)
    assert says in failure.text
    assert (OTHERS in failure.text) == (says == OTHERS)
    assert (failure.role, failure.rank) == (losses[0].role, losses[0].rank)


def test_no_process_is_known_to_be_lost() -> None:
    assert loss_failure(()).text == "a process of the job is lost"
