"""The X-ray of a quantized model: which layer loses accuracy, which takes time, and what to do about it."""
