"""Algorithms: what changes a model so that its quantized form keeps more of it, over anybody's quantizer.

Before: a prepared, calibrated graph. After: the same graph with weights whose roundings its output feels less.
"""
