"""`verl-mux plan`: where jobs would go (places.py), or with --memory what they need of each GPU (memory/certificate)."""
