"""The inside of a connection: what it is to its thread, its Sender and its Receiver, and how its session is called.

Begin with `core.py`.
"""
