"""Tasks: the rows, batches and loss of each training method; the loop is the engine's."""
