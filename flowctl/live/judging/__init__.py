"""Decisions about many peers, made from figures alone (pure): memory budget and its victims, shares, penalties.

Begin with `budget.py`.
"""
