"""The optimizer that all workers of a store on servers share, as one worker sees it.

Servers update. A worker has the optimizer's settings, to change them and to write them to files; the time of
a schedule is sent with each push, so that no server has to know what other workers have pushed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ....arrays.grouping import Key
from ....errors import ConfigError, StateFileError
from ....optimizer import Optimizer, Updater
from ....optimizer.descriptions import changes_of, text_of
from ....optimizer.settings_log import CONFIGURE, COUNTS, NONE, OPTIMIZER, STEPS
from ....optimizer.update_clock import UpdateClock
from ...entry import Array
from ..protocol import messages as m
from ..protocol.optimizer_states import split_states
from .client import WorkerClient
from .key_directory import DistKey

if TYPE_CHECKING:
    from ....optimizer.states import StatesContent


class WorkerOptimizer:
    """Optimizer and settings of one worker's store.

    A change has a place: the number of earlier calls of all workers together.
    """

    def __init__(self, client: WorkerClient) -> None:
        self._client = client
        self.updater: Updater | None = None
        #: The newest settings that this worker knows, sent with every push.
        self.version = 0
        #: The pushes since the optimizer was set.
        self.clock = UpdateClock()
        #: The number of optimizers that this worker has set, None included.
        self.ordinal = 0
        self._text = ""  # the description of `updater`
        self._keeps_states = False

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer with this worker's settings, if there is one."""
        return None if self.updater is None else self.updater.optimizer

    def install_optimizer(self, optimizer: Optimizer, place: int) -> None:
        """Have the servers update, with fresh states; equal calls of other workers change nothing."""
        answer = self._request_change(OPTIMIZER, _describe_optimizer(optimizer), self.ordinal + 1, place)
        self.ordinal += 1
        self._use_reply(answer, optimizer)
        self.clock = UpdateClock(optimizer.begin_num_update, epoch=answer.epoch)

    def remove_optimizer(self, place: int) -> None:
        """Return to plain sums."""
        answer = self._request_change(NONE, "", self.ordinal + 1, place)
        self.ordinal += 1
        self.note_version(answer.version)
        self.updater, self.clock = None, UpdateClock(epoch=answer.epoch)

    def change_settings(self, changes: Mapping[str, Any], place: int) -> None:
        """Change settings, from this worker's next push of each key on.

        Once there are states, their structure cannot change.
        """
        own = self._copy_optimizer()
        own.configure(**changes)
        self._use_reply(self._request_change(CONFIGURE, changes_of(own, changes), self.ordinal, place), own)

    def _copy_optimizer(self) -> Optimizer:
        assert self.updater is not None
        own = Optimizer.from_config(**self.updater.optimizer.describe())
        own._index_update_count, own.num_update = dict(self.clock.counts), self.clock.time
        return own

    def keep_states(self, place: int) -> None:
        """Have the servers store states for one more round, from this worker's next push of each key on."""
        if self._keeps_states or self.updater is None:
            return
        self.note_version(self._request_change(STEPS, "", self.ordinal, place).version)
        self._keeps_states = True

    def note_version(self, version: int) -> None:
        """Record a version of the settings, which holds from this worker's next push of each key on."""
        self.version = max(self.version, version)

    def learn_all(self, newest: m.MemberReply) -> None:
        """Record the settings that all workers agree on at a barrier."""
        self.note_version(newest.version)
        if newest.count == self.ordinal and newest.text:
            self._use_text(newest.text)

    def _request_change(self, kind: str, text: str, ordinal: int, place: int) -> m.MemberReply:
        settings = partial(m.SettingsRequest, kind=kind, ordinal=ordinal, text=text, place=place)
        return self._client.request_scheduler(settings, f"the settings of {kind}")

    def _use_reply(self, answer: m.MemberReply, optimizer: Optimizer) -> None:
        """Use the settings that hold for all: another worker may have changed more than this worker."""
        self._use_text(answer.text or _describe_optimizer(optimizer))
        self.note_version(answer.version)

    def _use_text(self, text: str) -> None:
        if self.updater is None or text != self._text:
            self.updater, self._text = Updater(Optimizer.from_config(**json.loads(text))), text

    def load_states(
        self, content: StatesContent, keys: Sequence[DistKey], key_templates: Mapping[Key, Array], place: int
    ) -> dict[int, bytes]:
        """Set settings and update counts of a file on the servers; return the states of all slices."""
        assert self.updater is not None
        loaded = Updater(self._copy_optimizer())
        loaded.adopt(content, key_templates)
        optimizer = loaded.optimizer
        if type(optimizer) is not type(self.updater.optimizer):
            raise StateFileError(
                f"the file has the optimizer {type(optimizer).__name__.lower()!r}, and the store's is "
                f"{type(self.updater.optimizer).__name__.lower()!r}; set that optimizer first"
            )
        if content.optimizer is not None:
            changes = changes_of(optimizer, optimizer.get_config())
            self._use_reply(self._request_change(CONFIGURE, changes, self.ordinal, place), optimizer)
        answer = self._request_change(COUNTS, "", self.ordinal, place)
        self.note_version(answer.version)
        self.clock = UpdateClock.from_optimizer(optimizer, answer.epoch)
        return split_states([key.entry for key in keys], loaded)


def _describe_optimizer(optimizer: Optimizer) -> str:
    try:
        return text_of(optimizer)
    except ConfigError as error:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be sent to servers: {error}; register its class with "
            "kvstore.optimizer.register, and import it there (`kvstore run --import MODULE`)"
        ) from error
