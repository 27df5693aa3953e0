"""oneDNN's kernels: q/dq patterns become calls of them."""
