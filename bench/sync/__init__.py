"""`verl-mux bench sync`: the product's own ends of a sync in processes on shaped links."""
