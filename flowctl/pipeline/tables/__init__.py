"""Tables: read, checked, put aside, accounted for, written.

Begin with `io.py`.
"""
