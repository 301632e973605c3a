"""What a server saw, kept: events and samples, and single viewers that can be played again."""
