"""Bans while it happens.

Begin with `job.py`.
"""
