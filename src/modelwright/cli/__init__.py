"""The commands; what they need is imported when they run, so that help answers at once."""
