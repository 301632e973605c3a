"""Programs that talk as peers: requests, messages, objects, jobs."""
