"""A server: accepts, admits, places and ends connections.

Begin with `server.py`.
"""
