"""A worker as a member of its store: the scheduler's views, and the rounds from which it takes part."""

from __future__ import annotations

from ...protocol.losses import loss_failure
from ...protocol.messages import Failure, ViewNotice, WelcomeNotice


class StoreMember:
    """The state of one worker in its store.

    A worker that has replaced a lost one is rejoining until the others have reached its join point, the slice
    into which it pushes first. In the join epoch it begins, and each of its slices has a first round.
    """

    def __init__(self) -> None:
        self.welcome: WelcomeNotice | None = None
        self.view: ViewNotice | None = None
        #: The epoch of the view that is known and whose join point, if it has one, is reached.
        self.epoch = 0
        self.rejoining = False
        self.join_epoch = 0
        #: (slice, round): the rounds before its own, from the scheduler.
        self.first_rounds: tuple[tuple[int, int], ...] = ()
        #: By rank, the seat of the host that a worker pushes for; empty where each pushes for itself.
        self.seats: dict[int, int] = {}

    def enter_store(self, welcome: WelcomeNotice) -> None:
        """Become a member."""
        self.welcome, self.seats = welcome, dict(welcome.seats)
        self.view = ViewNotice(
            welcome.store, welcome.epoch, welcome.members, (), (), welcome.servers, late=welcome.late
        )
        self.epoch, self.rejoining = welcome.epoch, welcome.rank in welcome.late

    def apply_view(self, view: ViewNotice) -> None:
        """Set a newer view; its epoch is reached at once, unless it has a join point of another worker."""
        self.view = view
        if self.rejoining or view.begin < 0:
            self.epoch = view.epoch

    def begin_pushes(self, view: ViewNotice) -> None:
        """Begin to push: all others have reached the join point."""
        self.rejoining, self.join_epoch, self.first_rounds = False, view.epoch, view.bases

    @property
    def is_broken(self) -> bool:
        """Whether rounds have ended with a loss."""
        return self.view is not None and self.view.broken

    def is_initializer(self) -> bool:
        """Return whether this worker's first values are used: it is the lowest member not rejoining."""
        if self.view is None or self.welcome is None:
            return False
        ranks = {one.rank for one in self.view.members}
        own = self.welcome.rank
        return own == min(ranks - set(self.view.late) or ranks, default=own)

    def lost_servers(self) -> set[int]:
        """Return the servers that are lost for good."""
        losses = self.view.losses if self.view is not None else ()
        return {one.rank for one in losses if one.role == "server"}

    def loss_failure(self) -> Failure:
        """Return the failure about the lost processes."""
        return (
            loss_failure(self.view.losses, len(self.view.servers))
            if self.view is not None
            else loss_failure(())
        )
