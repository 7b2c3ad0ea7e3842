"""The recipe: the whole wish, frozen, read with line numbers and checked before anything heavy starts."""
