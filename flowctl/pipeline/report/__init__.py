"""The report of the pipeline."""
