"""Who may call what: access levels of categories, and what a connection has proven.

Begin with `access.py`.
"""
