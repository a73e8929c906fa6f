"""Views for the log: the members, as a worker and a server receive them and the scheduler sends them."""

from __future__ import annotations

from typing import Any

from ....observe.membership import MembershipLog
from .messages import ReliableMessage, ViewNotice, WelcomeNotice


def tell_view(members: MembershipLog, view: ViewNotice | WelcomeNotice) -> None:
    """Log the changes in a view; a welcome has the first view of a worker."""
    lost = [f"{loss.role} {loss.rank}" for loss in view.losses] if isinstance(view, ViewNotice) else []
    there = {f"worker {one.rank}": one.incarnation for one in view.members}
    there |= {f"server {one.rank}": one.incarnation for one in view.servers}
    members.saw(view.store, view.epoch, there, lost)


def tell_message(members: MembershipLog, message: Any) -> None:
    """Log the view in a message between the scheduler and another process, if it has one."""
    if type(message) is ReliableMessage and type(message.body) is ViewNotice:
        tell_view(members, message.body)
