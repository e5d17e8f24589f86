"""Records that outlive a run, in a store that processes and machines share."""
