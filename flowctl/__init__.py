"""flowctl: flow control for servers that push data to many peers of unequal speed."""
