"""Proves from the log alone that nothing is stored twice.

    proof.py   what is proven, and what breaks it: functions on values
    scan.py    the two passes over the logs, with Spark

A producer's ids only grow, so two of its entries never share one: that is one comparison an entry,
made in the order of the log (pass one). Only the producers for which it does not come out are
looked at closely (pass two).
"""
