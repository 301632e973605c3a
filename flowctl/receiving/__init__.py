"""The inside of a Receiver (`flowctl.receiver`), and how a connection calls its session.

Begin with `holds.py`.
"""
