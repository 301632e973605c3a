"""ZMTP 3.1, what sockets of ZeroMQ say to each other over TCP and Unix sockets: plain (NULL) or encrypted (CURVE).

The wire is without I/O; `link.py` is a connection, and `listen.py` and `dial.py` make them.

Begin with `peer.py`.
"""
