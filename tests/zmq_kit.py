"""Raw ZeroMQ peers of tests."""

from __future__ import annotations

NEVER_MS = 600_000
"""Interval of reconnecting for a peer that is not to come back. With -1, which says so, libzmq 4.3 sometimes never ends
the context of a socket that is closed while its connection breaks."""
