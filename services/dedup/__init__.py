"""The dedup service: which of a producer's messages are new?"""
