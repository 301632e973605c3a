"""RPC that speaks OxenMQ: categories of commands, requests, access, jobs; one node is server and client at once.

Begin with `node.py`.
"""
