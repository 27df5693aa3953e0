"""From a q/dq graph to something that runs, one folder per target."""
