"""Files of unknown origin read without running them, and files that appear whole or not at all."""
