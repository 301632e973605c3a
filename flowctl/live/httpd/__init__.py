"""Media over HTTP on the live server's own poll groups: HTTP-FLV and WebSocket-FLV from the same stream logs.

Begin with `session.py`.
"""
