"""What follows from how many peers fare (pure): memory budget, shadow policies, shares.

Begin with `shadow.py`.
"""
