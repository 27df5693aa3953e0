"""A PT2E Quantizer plugin framework: a backend declares what its kernels can run."""
