"""The engine: one loop for every task, on one device or many, killed at any moment and none the worse."""
