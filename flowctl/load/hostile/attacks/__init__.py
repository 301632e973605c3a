"""The attacks, by what they abuse: each module has the profiles of one kind.

Begin with `chunk.py`.
"""
