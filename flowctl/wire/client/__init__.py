"""RTMP clients on poll groups: a publisher and a player for tools, tests and load; many share one thread.

Begin with `base.py`.
"""
