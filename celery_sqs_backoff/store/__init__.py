"""Keep records after the end of a run, in a store that processes and machines can share."""
