"""Whom to keep out or to slow down: what each address did, what it weighs, and the ban list.

Begin with `job.py`.
"""
