"""The analyses and the columns of their tables: sessions, fleet, abuse, capacity, what-if, and all of them in one run.

Begin with `sessions.py`.
"""
