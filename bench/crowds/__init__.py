"""The inside of the benches that put a whole crowd of viewers, or the server beneath it, into trouble at once."""
