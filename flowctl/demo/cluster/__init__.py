"""The demonstration of a cluster: two origins and two edges lose one origin in the middle, and viewers lose nothing.

Begin with `run.py`.
"""
