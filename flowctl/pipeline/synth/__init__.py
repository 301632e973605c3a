"""Event data of any size, made.

Begin with `job.py`.
"""
