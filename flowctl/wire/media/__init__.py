"""Media to stream when there is no camera: synthetic frames of chosen sizes, and short real samples made by FFmpeg.

Begin with `synthetic.py`.
"""
