"""A fleet: several servers with the same bans and limits, each of which is a member and speaks with all others.

Begin with `member.py`.
"""
