"""The bans of a live server: taken from its file, put by commands and penalties, kept across restarts.

Begin with `banning.py`.
"""
