"""``flowctl analyze``: one command per job."""
