"""Requests whose outcome comes exactly once, when to try again, and how often anything may come (pure).

Begin with `pending.py`.
"""
