"""Benches of pieces of the core, in one process, beside something well known.

Begin with `sender.py`.
"""
