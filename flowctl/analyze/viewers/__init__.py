"""What viewers had: their sessions, what they felt, and each stream minute by minute.

Closes say what a connection was in typed columns, so a session is a projection, and all else are sums over sessions.

Begin with `sessions.py`.
"""
