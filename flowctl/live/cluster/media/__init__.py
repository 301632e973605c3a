"""The process that writes streams of a server to files: what it is told, and how it is kept running.

Begin with `keeper.py`.
"""
