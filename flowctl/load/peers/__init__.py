"""The viewers and publishers of a load run.

Begin with `viewer.py`.
"""
