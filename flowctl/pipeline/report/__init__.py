"""The report of the pipeline.

Begin with `job.py`.
"""
