"""Benches of what is served over HTTP and TLS.

Begin with `http.py`.
"""
