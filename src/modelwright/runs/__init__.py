"""The run: one folder that holds everything, one process that may write it."""
