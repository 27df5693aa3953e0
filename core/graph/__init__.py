"""Exported graphs: facts about them, edits of them, copies of them."""
