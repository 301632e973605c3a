"""Reads records: which files there are, which of them and of their rows can be used, and accounts of all of them.

What the servers wrote and anybody may have touched since comes in here, and only rows that fit leave.

Begin with `read.py`.
"""
