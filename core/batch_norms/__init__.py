"""Batch norms: folded for inference, fused for training."""
