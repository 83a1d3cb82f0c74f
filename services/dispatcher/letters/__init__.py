"""Dead letters: what failed too often, on its way to another topic."""
