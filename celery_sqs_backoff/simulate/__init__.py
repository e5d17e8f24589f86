"""What would an outage do? A simulation with the policies, budgets and gate that workers use."""
