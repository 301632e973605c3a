"""Relays: streams of this server pushed to other RTMP servers, and streams of others pulled for viewers here.

Begin with `relay.py`.
"""
