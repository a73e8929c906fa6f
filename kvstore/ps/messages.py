"""What the processes of a parameter server tell each other: the types of `kvstore.wire.messages`.

They stand with the wire, whose frames they have to fit into; change them there.
"""

from kvstore.wire.messages import *  # noqa: F403
