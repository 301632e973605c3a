"""Requests whose outcome comes exactly once, and when to try again (pure).

Begin with `pending.py`.
"""
