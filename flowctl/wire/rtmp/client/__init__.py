"""The client's side of a session.

Begin with `session.py`.
"""
