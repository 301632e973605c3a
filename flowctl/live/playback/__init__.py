"""Recordings of a server played back: listed, given whole, and cut out by time, to those who may play their stream.

Begin with `serving.py`.
"""
