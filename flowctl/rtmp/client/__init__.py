"""The client's side of a session."""
