"""Two sides of ZMTP: pure ones that hand each other octets, and ours over sockets beside those of libzmq."""

from __future__ import annotations

import nacl.bindings as sodium

from flowctl.wire.zmtp.mechanism import CurveClient, CurveServer, Null
from flowctl.wire.zmtp.peer import Heartbeat, ZmtpLimits, ZmtpPeer

ROUTER = {b"Socket-Type": b"ROUTER"}
DEALER = {b"Socket-Type": b"DEALER", b"Identity": b"me"}


def key_pair():
    """Return a public and a secret key."""
    return sodium.crypto_box_keypair()


def admit_all(key, said):
    return {}


def mechanisms(kind, admit=admit_all, server_keys=None, client_keys=None, server_key=None):
    """Return both sides of a mechanism: the one that listens first."""
    if kind == "null":
        return Null(ROUTER, admit), Null(DEALER)
    server_keys, client_keys = server_keys or key_pair(), client_keys or key_pair()
    listening = CurveServer(ROUTER, *server_keys, admit)
    return listening, CurveClient(DEALER, *client_keys, server_key or server_keys[0])


class Side:
    """A pure peer, what it has sent, and what it was told."""

    def __init__(self, mechanism, limits=None, heartbeat=None):
        self.sent, self.messages, self.known, self.left = bytearray(), [], 0, b""
        self.peer = ZmtpPeer(
            mechanism,
            self.sent.extend,
            self.messages.append,
            self._known,
            limits=limits or ZmtpLimits(),
            heartbeat=heartbeat,
        )

    def _known(self):
        self.known += 1

    def take(self, now=0.0):
        """Return what it has sent since."""
        octets = bytes(self.sent)
        self.sent.clear()
        return octets

    def give(self, octets, now=0.0):
        octets = self.left + octets
        taken = self.peer.receive(memoryview(octets), now) if octets else 0
        self.left = octets[taken:]

    def say(self, *frames):
        self.sent.extend(self.peer.octets_of(frames))


def talk(one, other, now=0.0):
    """Have both say what they have to say until neither has more."""
    while one.sent or other.sent:
        other.give(one.take(), now)
        one.give(other.take(), now)


def pair(kind, limits=None, heartbeat=None, **options):
    """Return two sides that know each other."""
    listening, dialling = (Side(item, limits, heartbeat) for item in mechanisms(kind, **options))
    for side in (listening, dialling):
        side.peer.begin()
    talk(dialling, listening)
    return listening, dialling


BEAT = Heartbeat(each_s=15.0, dead_s=30.0)
