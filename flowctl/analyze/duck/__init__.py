"""DuckDB with Spark's meaning: texts of Spark's SQL, run by a database in this process.

`dialect.py` writes them as DuckDB's; macros are the functions that DuckDB lacks or means otherwise.

Begin with `session.py`.
"""
