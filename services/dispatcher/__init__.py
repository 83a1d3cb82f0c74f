"""The dispatcher service: which consumer of a subscription gets which message."""
