"""A fleet: several servers with the same bans and limits, each with an agent beside it.

The rules are pure: time and messages are arguments.
Begin with `table.py`.
"""
