"""Commands that a server runs for its streams: when, as which processes, and with what in their hands.

Begin with `commands.py`.
"""
