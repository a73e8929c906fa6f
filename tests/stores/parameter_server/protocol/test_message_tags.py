"""The tags of messages on the wire, and their field names, do not change when a class is renamed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.stores.parameter_server.protocol import messages as m

#: By tag; processes of one version of the protocol agree on the tags.
TAGGED = {
    "Hello": m.HelloRequest,
    "Bye": m.ProcessEndNotice,
    "Leave": m.LeaveNotice,
    "MemberRequest": m.MemberRequest,
    "JoinRounds": m.JoinRequest,
    "Begin": m.RejoinBeginNotice,
    "Reached": m.JoinPointNotice,
    "Barrier": m.BarrierRequest,
    "Found": m.CreateKeysRequest,
    "Ready": m.KeysReadyRequest,
    "Lookup": m.LookupRequest,
    "Count": m.LostCountRequest,
    "Drop": m.DropKeysRequest,
    "Settings": m.SettingsRequest,
    "Command": m.CommandRequest,
    "Installed": m.InstallReply,
    "Ping": m.PingRequest,
    "Met": m.HelloReply,
    "Welcome": m.WelcomeNotice,
    "Refused": m.RefusalNotice,
    "View": m.ViewNotice,
    "Answer": m.MemberReply,
    "Install": m.InstallRequest,
    "Slices": m.SlicesNotice,
    "Pong": m.PingReply,
    "Over": m.JobEndNotice,
    "Attach": m.AttachRequest,
    "Attached": m.AttachReply,
    "Fenced": m.FenceNotice,
    "Who": m.MissingRequest,
    "Missing": m.MissingReply,
    "LeftOut": m.LeftOutNotice,
    "Letter": m.ReliableMessage,
}
#: Parts of messages, which are sent as arrays without a tag.
UNTAGGED = [m.Failure, m.Member, m.Loss, m.Slice, m.KeySpec, m.KeyEntry]


def test_each_message_has_its_tag() -> None:
    kinds = [kind for kind in vars(m).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    found = {kind.__struct_config__.tag: kind for kind in kinds if kind.__struct_config__.tag}
    assert found == TAGGED
    assert [kind for kind in kinds if not kind.__struct_config__.tag] == UNTAGGED
    assert all(kind.__struct_config__.array_like for kind in UNTAGGED)


@pytest.mark.parametrize(
    ("message", "sent"),
    [
        (m.ProcessEndNotice("w0", lost=True), {"type": "Bye", "process": "w0", "lost": True}),
        (
            m.CreateKeysRequest(3, 0, (m.KeySpec("k", (2,), "float32"),)),
            {
                "type": "Found",
                "request": 3,
                "store": 0,
                "keys": [["k", [2], "float32", False, False]],
            },
        ),
        (
            m.ReliableMessage(1, 2, m.PingRequest(7)),
            {"type": "Letter", "number": 1, "seen": 2, "body": {"type": "Ping", "number": 7}, "term": 0},
        ),
    ],
)
def test_a_message_is_sent_with_its_tag(message: Any, sent: dict[str, Any]) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message)) == sent
