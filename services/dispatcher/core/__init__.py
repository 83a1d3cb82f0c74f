"""The rules of dispatching, as values, functions and machines."""
