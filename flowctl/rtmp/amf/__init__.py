"""AMF0 and AMF3: values, readers and writers."""
