"""What other limits would have done for a recorded viewer.

Begin with `engine.py`.
"""
