"""Text that leaves the process: to a terminal, a log, a file of results.

Begin with `output.py`.
"""
