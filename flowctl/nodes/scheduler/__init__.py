"""Who may ask which peer now: offers of peers' channels to those that wait for one.

Begin with `offer.py`.
"""
