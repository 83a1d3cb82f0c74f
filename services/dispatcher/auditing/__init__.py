"""Audit topics: the histories of messages, for as long as the ledger keeps them."""
