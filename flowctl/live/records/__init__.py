"""What a live server records: events, samples, flights."""
