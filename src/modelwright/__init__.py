"""Modelwright turns one file, a recipe, into a trained model."""

__version__ = "0.1.0"
