"""Proves from the log alone that nothing is stored twice.

    proof.py   the property and its violations: functions on values
    scan.py    the two passes over the logs, with Spark

A producer's ids only grow, so no two of its entries share one. Pass one checks this with one
comparison per entry, in log order. Pass two checks producers that fail it in detail.
"""
