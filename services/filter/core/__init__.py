"""Decisions of the filter service: values in, values out."""
