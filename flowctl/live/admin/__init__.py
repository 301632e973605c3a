"""The admin surface over HTTP: API, events, metrics and dashboard, made from the operations; needs the extra ``admin``.

Begin with `listener.py`.
"""
