"""HLS of a set of renditions: its variants, written alike, and the playlist that names them.

Begin with `variantset.py`.
"""
