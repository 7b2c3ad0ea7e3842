"""Recipes: schema, loading with line numbers, checks, explanation and conversion; nothing here imports torch."""
