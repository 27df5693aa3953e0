"""Prepare and convert: observers in, quantize and dequantize nodes out."""
