"""What diffusing peers send each other (pure): messages, their CBOR, and the mini-protocol as a table.

Begin with `protocol.py`.
"""
