"""Spark itself: Java, sessions, class archive, progress."""
