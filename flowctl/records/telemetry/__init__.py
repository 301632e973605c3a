"""Telemetry: what a server saw of its peers, as records that are written to Parquet files.

`records.telemetry.schema` is the contract between those who write the records and those who read them; neither imports
the other.

Begin with `schema.py`.
"""
