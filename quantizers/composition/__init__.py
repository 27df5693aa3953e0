"""Several quantizers on one model."""
