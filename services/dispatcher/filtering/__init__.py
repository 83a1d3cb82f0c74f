"""A subscription's filters: chains that apply, that only count (shadow), or that are tried."""
