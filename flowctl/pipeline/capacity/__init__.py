"""How many viewers a node carries.

Begin with `model.py`.
"""
