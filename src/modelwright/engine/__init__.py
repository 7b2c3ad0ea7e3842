"""The engine: one training loop for every task, on one or many devices, with exact resume after a kill."""
