"""Backends as declarations, one file each, and what all of them share."""
