"""Messages with a callback each, delivered exactly once in effect, over ZeroMQ.

Begin with `messenger.py`.
"""
