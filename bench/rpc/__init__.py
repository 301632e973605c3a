"""What the bench of RPC runs: servers that echo, concurrent callers, a peer that floods.

Begin with `server.py`; all but RPyC speak the frames of our wire: ``[command, tag, part]`` and ``[REPLY, tag, part]``.
"""
