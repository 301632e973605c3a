"""The viewers and publishers of a load run."""
