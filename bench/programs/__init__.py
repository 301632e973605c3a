"""Programs that benches start: a server with its figures in reach, publishers and viewers.

Begin with `live_server.py`.
"""
