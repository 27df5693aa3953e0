"""Lowering to a module of oneDNN quantized operators."""
