"""Sets of renditions: one content in several sizes, of which each viewer gets the largest that its line carries.

Begin with `renditionset.py`.
"""
