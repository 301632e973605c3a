"""WebSocket (RFC 6455) as a server speaks it: handshake, frames, permessage-deflate (RFC 7692); without sockets.

Begin with `frames.py`.
"""
