"""What tests of streams and exchanges share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.stores.parameter_server.transport.native._streams import Sender


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.close()
