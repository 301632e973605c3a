"""What a live server records: events, samples, flights.

Begin with `sampler.py`.
"""
