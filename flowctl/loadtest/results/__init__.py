"""What a load run found, and how it is shown.

Begin with `result.py`.
"""
