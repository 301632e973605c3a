"""DuckDB with Spark's meaning: the DataFrames and functions that jobs use, as SQL for a database in this process.

A column is a piece of SQL, a frame a SELECT that runs when its rows are asked for; macros are the functions that DuckDB
lacks or means otherwise.

Begin with `functions.py`.
"""
