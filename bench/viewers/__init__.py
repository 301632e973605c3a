"""Benches of what slow viewers get, and what they cost the others.

Begin with `slow.py`.
"""
