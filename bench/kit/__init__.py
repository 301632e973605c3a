"""What benches share: processes, tables, charts, documents.

Begin with `processes.py`.
"""
