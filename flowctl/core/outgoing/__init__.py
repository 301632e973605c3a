"""What waits for one peer, and in what order it goes out (pure): own queue, stream log, cursor, refusals.

Begin with `streamlog.py`.
"""
