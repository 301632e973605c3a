"""Event data of any size, made."""
