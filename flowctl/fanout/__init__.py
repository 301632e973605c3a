"""One stream log to many peers."""
