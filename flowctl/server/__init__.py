"""A server: accepts, admits, places and ends connections."""
