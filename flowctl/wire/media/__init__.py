"""Media to stream when there is no camera: synthetic frames of chosen sizes, each with a number and a time.

Begin with `synthetic.py`.
"""
