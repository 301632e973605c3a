"""The demonstration of the closed loop: records, analysis, new limits and bans for the running server.

Begin with `run.py`.
"""
