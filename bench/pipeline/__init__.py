"""What the bench of the pipeline runs: engines, queries, and whether they give the same.

Begin with `engines.py`.
"""
