"""What a quantizer asks for: specs, dtypes, limits, sharing, and what was decided."""
