"""A client of TLS that sends new keys, as many as a test wants."""

from __future__ import annotations

import _ssl
import ctypes


class KeyUpdates:
    """A client of OpenSSL's own that can send new keys, which Python's module cannot."""

    def __init__(self, sock):
        # The library that the module itself has loaded.
        self.lib, self.sock = ctypes.CDLL(_ssl.__file__), sock
        for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new", "BIO_s_mem", "BIO_new"):
            getattr(self.lib, name).restype = ctypes.c_void_p
        pointer = ctypes.c_void_p
        context = self.lib.SSL_CTX_new(pointer(self.lib.TLS_client_method()))
        self.tls = pointer(self.lib.SSL_new(pointer(context)))
        self.came, self.goes = (pointer(self.lib.BIO_new(pointer(self.lib.BIO_s_mem()))) for _ in range(2))
        self.lib.SSL_set_bio(self.tls, self.came, self.goes)
        self.lib.SSL_set_connect_state(self.tls)

    def step(self):
        """Go on with the handshake; return what is to be sent."""
        self.lib.SSL_do_handshake(self.tls)
        buffer = ctypes.create_string_buffer(65536)
        size = self.lib.BIO_read(self.goes, buffer, len(buffer))
        return buffer.raw[: max(size, 0)]

    def give(self, data):
        self.lib.BIO_write(self.came, data, len(data))

    def update(self, *, answer=False):
        """Return a record with new keys; `answer`: the peer is to send new ones too."""
        assert self.lib.SSL_key_update(self.tls, int(answer)) == 1
        return self.step()
