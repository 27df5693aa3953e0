"""Random models through the whole flow: what runs is held against its graph, its float model and a second call."""
