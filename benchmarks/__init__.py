"""Benchmarks beside peers: `python -m benchmarks.NAME --help`."""
