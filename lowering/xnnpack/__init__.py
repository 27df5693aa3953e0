"""Lowering to an ExecuTorch program whose kernels are XNNPACK's."""
