"""The inside of a Sender (`flowctl.sender`), under its lock.

Begin with `contract.py`.
"""
