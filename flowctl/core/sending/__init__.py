"""The inside of a Sender (`flowctl.sender`), under its lock.

`judgement.py` decides, `serving.py` executes.

Begin with `contract.py`.
"""
