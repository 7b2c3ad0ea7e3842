"""Use a model: put questions to it the way it was trained."""
