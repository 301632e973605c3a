"""What runs, when, and on which thread: slots and queues, batches, timers, worker threads.

Begin with `slots.py`.
"""
