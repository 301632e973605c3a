"""How a request ends: in exactly one of these ways, whatever else arrives for it afterwards."""

from __future__ import annotations

import enum


class Outcome(enum.Enum):
    """How a request ended."""

    RESPONSE = "response"  #: the peer answered
    TIMEOUT = "timeout"  #: its deadline passed
    DISCONNECTED = "disconnected"  #: the connection to the peer ended
    SHUTDOWN = "shutdown"  #: our side was stopped
    WITHDRAWN = "withdrawn"  #: our caller gave it up
    REJECTED = "rejected"  #: the peer, or a limit of ours, refused it
