"""Live streams written to files: recordings as FLV and fragmented MP4, and HLS; nothing is transcoded.

Begin with `recorder.py`.
"""
