"""Workers: one live server in several processes on one port, a supervisor above them, and what they share.

Begin with `supervisor.py`.
"""
