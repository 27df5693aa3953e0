"""Rewrites of float graphs, which compute the same numbers with other operators; they belong to no target."""
