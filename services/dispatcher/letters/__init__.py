"""Dead letters: entries that failed too often, on their way to another topic."""
