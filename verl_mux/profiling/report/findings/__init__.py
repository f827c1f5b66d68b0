"""What cost time and what to do about it: one function a kind, registered in output/summary.py. Runs in the report; pure."""
