"""The jobs: sessions, fleet, abuse, and all of them.

Begin with `sessions.py`.
"""
