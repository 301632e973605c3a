"""Folders that files are written to: where they are, and that no other user leads what is written elsewhere.

Begin with `folders.py`.
"""
