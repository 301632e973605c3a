"""ZMTP 3.1, what sockets of ZeroMQ say to each other over TCP and Unix sockets: plain (NULL) or encrypted (CURVE).

All but `session.py` is without I/O.

Begin with `peer.py`.
"""
