"""Benchmarks against peers: `python -m benchmarks.NAME --help`."""
