"""Load testing: crowds of healthy, slow and hostile peers against an RTMP server, measured per peer and judged.

Begin with `run.py`.
"""
