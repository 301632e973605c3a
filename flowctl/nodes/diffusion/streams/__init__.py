"""Streams of octets that diffusion runs over: within the process, and over sockets.

Begin with `tcp.py`.
"""
