"""Quantize and dequantize nodes: their numbers, what they compute, and graphs that consist of them."""
