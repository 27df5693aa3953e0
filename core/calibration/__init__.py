"""From a loader to ranges: batches, runs, checkpoints, processes, results."""
