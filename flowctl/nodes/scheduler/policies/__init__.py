"""Rules that a scheduler asks: whose turn, which peer, how many at once, who is left out for a while (pure).

Begin with `fairness.py`.
"""
