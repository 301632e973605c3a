"""Test kit: flow control without sockets and without sleeping.

`ManualClock` moves only when told. `ScriptedTransport` takes what its script says, EAGAIN and errors included;
`ThrottledPeer` is an in-memory peer with a kernel buffer and a link of a given rate. `ManualHost` stands in for the
connection and its thread: it collects flush requests and deadlines and runs them when asked. `check_drop_policy`
tests a drop policy of one's own against what every policy must hold to. `drive` runs a session of one's own.

Begin with `driving.py`.
"""

from flowctl.testing.driving import Driven, drive
from flowctl.testing.host import ManualClock, ManualGroup, ManualHost
from flowctl.testing.policies import check_drop_policy
from flowctl.testing.transports import ScriptedTransport, ThrottledPeer, would_block

__all__ = [
    "Driven",
    "ManualClock",
    "ManualGroup",
    "ManualHost",
    "ScriptedTransport",
    "ThrottledPeer",
    "check_drop_policy",
    "drive",
    "would_block",
]
