"""The pipeline: from the records of servers to decisions, on DuckDB or Spark; needs the extra ``pipeline``.

Nothing else in flowctl imports this package, so that a server needs neither. What both sides share is
`flowctl.records.telemetry.schema`. A job makes parts of the records of each hour, and an answer
of the parts of all hours: see `flowctl.analyze.job.AnalysisJob`.

Begin with `job.py`.
"""
