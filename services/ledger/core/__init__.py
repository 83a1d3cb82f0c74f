"""The rules of the log, as values, functions and one machine."""
