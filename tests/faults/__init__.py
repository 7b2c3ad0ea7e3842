"""Fault injection: what a run survives; `python -m tests.faults.scorecard --help`."""
