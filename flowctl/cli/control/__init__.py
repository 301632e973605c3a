"""Commands that speak with servers that run: operations, RPC, and fleets of them.

Begin with `operations.py`.
"""
