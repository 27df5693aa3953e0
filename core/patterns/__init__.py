"""Pieces of graphs: the language that describes them, and how they are found."""
