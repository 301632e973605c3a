"""Looks at all slow viewers of a server in turn, and does what `judging` decides; tells publishers; logs episodes.

Begin with `oversight.py`.
"""
