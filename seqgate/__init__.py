"""Seqgate: publish exactly once, read in order.

seqgate.client   the client library
seqgate.errors   what can go wrong
seqgate.types    names, positions, ids
seqgate.api      the wire contract, generated from protos/
"""
