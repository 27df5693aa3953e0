"""Names of peers that have no public way to them, one file a library.

Before: a pinned version of a library. After: the names and functions that the rooms above call; nothing else of ours
reads a private name of that library.
"""
