"""The bans of a live server: read from its file, said by commands, penalties and its fleet, kept across restarts.

Begin with `book.py`.
"""
