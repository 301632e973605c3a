"""Live streaming: the hub of streams, publications, publish and play sessions, and the drop policy."""
