"""Tables: read, checked, put aside, accounted for, written."""
