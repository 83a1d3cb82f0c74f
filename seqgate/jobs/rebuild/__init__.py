"""Restores deduplication state from the log, for many topics at once, with Spark.

    plan.py     which topics, from which snapshot on, and which of them go together in a wave
    source.py   the first half of a wave: logs are read and folded, a row a producer comes out
    folding.py  the fold over columns
    loading.py  the second half: what parts of a log come to is put together on top of the snapshot,
                and loaded through the dedup service, or compared with what is there
    screen.py   what a person sees, or a program

A topic is loaded as soon as its wave has folded it, all at once or not at all, so this can be
killed at any time and run again, and two that run at once do not interfere.
"""
