"""Modelwright turns one file, a recipe, into a trained model."""

__version__ = "0.2.0"
