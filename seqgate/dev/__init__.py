"""All of Seqgate on one machine, with an embedded Redis server: `seqgate dev`. It needs the extra
`server`. Tests and the demo run on it, too.
"""
