"""Whose fault it is that a connection could not be made: ours, where this machine or the tester ran out of something.

A load tester that has no descriptors, ports or memory left must not say that the server does not answer.
"""

from __future__ import annotations

import errno
from typing import Final

OWN_FAULTS: Final = frozenset(
    {
        errno.EMFILE,  # descriptors of the process
        errno.ENFILE,  # descriptors of the machine
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EADDRNOTAVAIL,  # no such source address, or no port left on it
        errno.EADDRINUSE,
        errno.EAFNOSUPPORT,
        errno.EACCES,  # a firewall or a sandbox of ours: nothing has left this machine
        errno.EPERM,
    }
)
"""Error numbers with which the system says that it could not even try."""


class TesterFailedError(Exception):
    """The load tester could not do what it was to do; says nothing about the server."""


def own_fault(error: OSError) -> bool:
    """Return whether `error`, met while a socket was made, bound or connected, is this side's fault."""
    return error.errno in OWN_FAULTS
