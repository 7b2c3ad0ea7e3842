"""Load, modify, train in parts and save models."""
