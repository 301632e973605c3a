"""One thread: its loop, deferred jobs, deadlines, watched descriptors, sockets, locks and accounts of work.

Begin with `jobs.py`.
"""
