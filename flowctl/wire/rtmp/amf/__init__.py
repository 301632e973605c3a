"""AMF0 and AMF3: values, readers, and the writer of AMF0.

Begin with `amf0.py`.
"""
