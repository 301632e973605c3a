"""The handshake, simple and with digests.

Begin with `handshake.py`.
"""
