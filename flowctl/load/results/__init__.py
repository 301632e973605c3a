"""What a load run found, and how it is shown: figures, conditions, tables, pictures, pages.

Begin with `result.py`.
"""
