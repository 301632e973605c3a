"""The report: what to do and how sure that is, then what viewers felt, then evidence, as one HTML page.

Begin with `job.py`.
"""
