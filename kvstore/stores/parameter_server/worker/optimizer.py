"""The optimizer that all workers of a store on servers have in common, as one of them sees it.

Servers update. A worker keeps the optimizer's settings, to change them and to write them to files; the
schedule's time travels with each push, so that no server has to know what the others have done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ....arrays.grouping import Key
from ....errors import ConfigError
from ....optimizer import Optimizer, Updater
from ....optimizer.descriptions import conflict, text_of
from ...entry import Array
from ..protocol import messages as m
from ..protocol.optimizer_states import join_states, needs_whole_keys, split_states
from .client import Client
from .key_directory import DistKey
from .replies import CollectStates

if TYPE_CHECKING:
    from ....optimizer.states import Content


class WorkerOptimizer:
    """Optimizer and versions of one worker's store."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.updater: Updater | None = None
        #: What this worker has agreed to; it goes with every push.
        self.version = 0
        self._set = 0  # how often this worker has set one
        self._begin = 0  # this worker's clock as it set the last one
        self._keeps_states = False

    @property
    def wants_whole_keys(self) -> bool:
        """Whether the rule must see whole tensors."""
        return self.updater is not None and needs_whole_keys(self.updater.optimizer)

    def install(self, optimizer: Optimizer, clock: int) -> None:
        """Have the servers update, with fresh states; the first of equals does, and others change nothing.

        The schedule counts from `clock` on, what has been pushed so far.
        """
        answer = self._agree("optimizer", _described(optimizer), self._set + 1, clock)
        self._set, self._begin = self._set + 1, clock
        self._adopt(answer, optimizer)

    def unset(self) -> None:
        """Go back to plain sums."""
        answer = self._agree("none", "", self._set + 1)
        self._set += 1
        self.updater, self.version = None, answer.version

    def change(self, change: Callable[[Optimizer], None], clock: int) -> None:
        """Change settings, from this worker's next push of each key on.

        `clock` counts what it has pushed; with states on the servers, their form cannot change.
        """
        assert self.updater is not None
        own = Optimizer.from_config(**self.updater.optimizer.describe())
        if clock > self._begin:
            own._index_update_count = {0: clock - self._begin}
        change(own)
        self._adopt(self._agree("configure", _described(own), self._set), own)

    def keep_states(self) -> None:
        """Have the servers keep states for one more round, from this worker's next push of each key on."""
        if self._keeps_states or self.updater is None:
            return
        self.version = self._agree("steps", "", self._set).version
        self._keeps_states = True

    def _agree(self, kind: str, text: str, ordinal: int, clock: int = 0) -> m.Answer:
        settings = partial(m.Settings, kind=kind, ordinal=ordinal, text=text, clock=clock)
        try:
            return self._client.request(settings, f"the settings of {kind}")
        except ConfigError as error:
            there = m.optimizer_there(str(error))
            if there is None:
                raise
            rank, theirs = there
            raise ConfigError(conflict(theirs, rank, text, self._client.rank)) from error

    def _adopt(self, answer: m.Answer, optimizer: Optimizer) -> None:
        """Keep what holds for all: somebody may have changed more than this worker has."""
        described = json.loads(answer.text) if answer.text else optimizer.describe()
        self.updater = Updater(Optimizer.from_config(described["name"], described["config"]))
        self.version = answer.version

    def joined(self, found: CollectStates) -> Updater:
        """Put states that have come from the servers together, as a store of one process has them."""
        assert self.updater is not None
        entries = [key.entry for key in found.keys]
        return join_states(entries, found.found, self.updater.optimizer)

    def adopt(
        self, content: Content, keys: Sequence[DistKey], key_templates: Mapping[Key, Array], clock: int
    ) -> dict[int, bytes]:
        """Agree with the servers on the settings of a file, and return the states of all slices.

        The schedule goes on from the file's time.
        """
        assert self.updater is not None
        loaded = Updater(Optimizer.from_config(**self.updater.optimizer.describe()))
        loaded.adopt(content, key_templates)
        if loaded.optimizer.describe() != self.updater.optimizer.describe():
            self._adopt(self._agree("configure", _described(loaded.optimizer), self._set), loaded.optimizer)
        answer = self._agree("clock", str(loaded.optimizer.num_update - clock), self._set)
        self.version = answer.version
        return split_states([key.entry for key in keys], loaded)


def _described(optimizer: Optimizer) -> str:
    try:
        return text_of(optimizer)
    except ConfigError as error:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot travel to the servers: {error}; register its class with "
            "kvstore.optimizer.register, and import it there (`kvstore run --import MODULE`)"
        ) from error
