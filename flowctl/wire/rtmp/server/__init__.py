"""The server's side of a session.

Begin with `session.py`.
"""
