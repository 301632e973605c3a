"""Hostile peers: every known way to hurt an RTMP server from the client's side, as profiles of the load tester.

`flowctl.load.hostile.registry` lists them all; `flowctl.load.hostile.base` says what one is.
They stand by what they aim at: the chunk stream, AMF values, sessions (connections, handshakes, names), publishers,
viewers that read badly, protocol control, and work within all limits.

Begin with `registry.py`.
"""
