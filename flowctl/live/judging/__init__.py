"""Decisions about many peers, made from figures alone (pure): memory budget and its victims, shadow policies, shares.

Begin with `shadow.py`.
"""
