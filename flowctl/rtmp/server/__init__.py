"""The server's side of a session."""
