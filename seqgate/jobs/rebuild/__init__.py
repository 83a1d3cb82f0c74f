"""Restores deduplication state from the log, for many topics at once, with Spark.

    plan.py     the topics, their snapshots, and their division into waves
    source.py   the first half of a wave: logs are read and folded to a row per producer
    folding.py  the fold over columns
    loading.py  the second half: the parts of a log are combined on top of the snapshot, and loaded
                through the dedup service, or compared with the present state
    screen.py   the report, as text or JSON

A topic is loaded as soon as its wave has folded it, whole or not at all. So a rebuild can be killed
at any time and run again, and two at once do not interfere.
"""
