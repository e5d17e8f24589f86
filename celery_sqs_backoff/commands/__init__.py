"""Command line programs: thin shells over engines that print nothing."""
