"""A live stream as objects: cut at key frames into segments with content hashes, kept, and put together again (pure).

Begin with `segment.py`.
"""
