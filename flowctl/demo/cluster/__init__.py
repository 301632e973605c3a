"""The demonstration of a cluster: four origins (one killed, one lying, one slow), two edges, viewers that lose nothing.

Begin with `run.py`.
"""
