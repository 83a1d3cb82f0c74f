"""Seqgate: publish exactly once, read in order.

seqgate.client   the client library
seqgate.errors   its exceptions
seqgate.types    names, positions, ids
seqgate.api      the wire contract, generated from protos/
"""
