"""Benches of whole programs: servers with their peers, and the pipeline.

Begin with `compare.py`.
"""
