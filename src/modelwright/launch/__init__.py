"""Starting a recipe on many processes and many nodes, and watching over them."""
