"""Which limits and drop policies would have been better.

Begin with `job.py`.
"""
