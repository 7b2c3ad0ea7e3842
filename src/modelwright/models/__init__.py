"""Models: found by name or folder, told which weights move, saved so that others can read them."""
