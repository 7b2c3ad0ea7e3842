"""Show a run to people: readers of its journal, on which training never depends."""
