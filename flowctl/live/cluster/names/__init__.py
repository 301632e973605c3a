"""Who publishes which name, in one place for all workers, and which worker follows whom for its viewers.

Begin with `directory.py`.
"""
