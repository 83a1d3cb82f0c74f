"""Proves from the log alone that nothing is stored twice.

    proof.py   the property and its violations: functions on values
    scan.py    the two passes over the logs, with Spark

A producer's ids only grow, so no two of its entries share one: that takes one comparison per entry,
in the order of the log (pass one). Only producers that fail it are checked in detail (pass two).
"""
