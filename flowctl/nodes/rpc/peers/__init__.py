"""Connections to other nodes: listeners with many, dialled ones, and what the other end is known to be.

Begin with `peer.py`.
"""
