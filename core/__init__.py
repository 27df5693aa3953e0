"""Graph facts that no backend owns: patterns, matching, plan, prepare, calibrate, convert, report."""
