"""RTMP without I/O: the wire, messages, commands, limits, and sessions that are handed bytes and time.

Begin with `messages.py`.
"""
