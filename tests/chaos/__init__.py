"""Chaos: real processes, real faults, and a checker that counts what became of every message.

`python -m tests.chaos` runs it for minutes; `test_chaos.py` runs it for seconds, with fixed seeds.
"""
