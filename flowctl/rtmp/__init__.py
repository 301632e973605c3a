"""RTMP without I/O: handshakes, chunks, AMF, messages and sessions as state machines that are handed bytes and time.

Begin with `messages.py`.
"""
