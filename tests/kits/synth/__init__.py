"""Records of any size, made, with worlds planted in them.

Begin with `make.py`.
"""
