"""Data: rows with a known origin, conversations with true masks, batches in an order that is a function."""
