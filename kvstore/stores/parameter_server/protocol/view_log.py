"""Views for the log: what a worker, a server and the scheduler hear, or say, of who takes part."""

from __future__ import annotations

from typing import Any

from ....observe.membership import MembershipLog
from .messages import ReliableMessage, View, Welcome


def tell_view(members: MembershipLog, view: View | Welcome) -> None:
    """Log what a view has that is new; a welcome has the first view of a worker."""
    lost = [f"{loss.role} {loss.rank}" for loss in view.losses] if isinstance(view, View) else []
    there = {f"worker {one.rank}": one.incarnation for one in view.members}
    there |= {f"server {one.rank}": one.incarnation for one in view.servers}
    members.saw(view.store, view.epoch, there, lost)


def tell_message(members: MembershipLog, message: Any) -> None:
    """Log the view in a message between the scheduler and another process, if there is one."""
    if type(message) is ReliableMessage and type(message.body) is View:
        tell_view(members, message.body)
