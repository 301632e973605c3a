"""Sockets of ZeroMQ on a poll group: raw, never waited for; keys and admission (CURVE, ZAP).

Begin with `socket.py`.
"""
