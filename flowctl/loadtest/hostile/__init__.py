"""Hostile peers: every known way to hurt an RTMP server from the client's side, as profiles of the load tester.

`flowctl.loadtest.hostile.registry` lists them all; `flowctl.loadtest.hostile.base` says what one is.

Begin with `registry.py`.
"""
