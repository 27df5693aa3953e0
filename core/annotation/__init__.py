"""From annotators and configs to annotations: decided, checked, kept as a plan."""
