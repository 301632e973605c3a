"""Messengers under measurement and in trouble: their programs, and a link that loses what passes.

Begin with `link.py`.
"""
