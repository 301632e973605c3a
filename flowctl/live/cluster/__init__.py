"""Live streams on several processes: workers on one port, origins, and edges that follow them.

Begin with `follow.py`.
"""
