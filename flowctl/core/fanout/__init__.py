"""One stream log to many peers.

Begin with `fanout.py`.
"""
