"""``flowctl analyze``: one command per job.

Begin with `app.py`.
"""
