"""Benches that break things on purpose: processes are killed, links lose what passes.

Begin with `messenger_faults.py`.
"""
