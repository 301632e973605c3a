"""Spark itself: Java, sessions, class archive, progress.

Begin with `session.py`.
"""
