"""`verl-mux plan`: where jobs would go (simulation/plan.py), or with --memory what they need of each GPU (memory/certificate)."""
