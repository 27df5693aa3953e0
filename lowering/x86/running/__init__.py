"""How an x86 program runs: packed weights, eager calls, compiled packages."""
