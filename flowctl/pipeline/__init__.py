"""The pipeline: from the records of servers to decisions, on Spark; needs the extra ``pipeline`` and Java 17 or newer.

Nothing else in flowctl imports this package, so that a server needs neither. What both sides share is
`flowctl.telemetry.schema`. A job is a module with pure functions from DataFrame to DataFrame, and a function
``run(spark, events, out, options)`` that reads, calls them, writes, and returns an `accounts.JobResult`.
"""
