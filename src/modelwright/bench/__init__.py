"""Benchmarks: what is measured, against whom, one command each; the peer runs beside us on the same machine."""
