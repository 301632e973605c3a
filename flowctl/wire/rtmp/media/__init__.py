"""What audio and video messages hold, as far as a server has to know.

Begin with `media.py`.
"""
