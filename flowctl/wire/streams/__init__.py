"""A published stream in one wire format: its log, its headers, and where viewers may start.

Begin with `wirelog.py`.
"""
