"""Pools of objects: what a node has, in the order in which it came.

Begin with `pool.py`.
"""
