"""Tasks: what is learnt. Each is batches, a module and its loss; the loop is the engine's."""
