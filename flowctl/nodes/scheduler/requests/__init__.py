"""Ready-made senders: one message to many peers in turn, and one question asked until it is answered.

Begin with `requester.py`.
"""
