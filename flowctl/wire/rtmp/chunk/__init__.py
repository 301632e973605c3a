"""The chunk stream: messages cut into chunks and put together again.

Begin with `reader.py`.
"""
