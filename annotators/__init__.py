"""Composable annotators, one file per operator family, and the presets of their configs."""
