"""How many viewers a node carries.

Begin with `job.py`.
"""
