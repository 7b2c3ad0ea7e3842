"""Prepare raw text for pretraining: clean, deduplicate, decontaminate, tokenize and pack."""
