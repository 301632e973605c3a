"""Benches of streams on several processes: workers on one port, origins and edges.

Begin with `workers.py`.
"""
