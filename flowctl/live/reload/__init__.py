"""Limits and bans that a running server takes from files.

Begin with `reload.py`.
"""
