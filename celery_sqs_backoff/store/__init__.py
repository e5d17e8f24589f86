"""Keep records beyond the end of a run, in a store that processes and machines share."""
