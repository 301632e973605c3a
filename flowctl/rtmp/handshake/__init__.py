"""The handshake, simple and with digests."""
