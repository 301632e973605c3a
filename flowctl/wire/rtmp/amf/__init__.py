"""AMF0 and AMF3: values, readers and writers.

Begin with `amf0.py`.
"""
