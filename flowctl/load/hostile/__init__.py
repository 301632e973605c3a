"""Hostile peers: every known way to hurt a server from the client's side, as profiles of the load tester.

`base` says what one is. They stand in `attacks` by what they aim at: the chunk stream, AMF values, sessions
(connections, handshakes, names), publishers, viewers that read badly, protocol control, HTTP, and work within all
limits.

Begin with `base.py`.
"""
