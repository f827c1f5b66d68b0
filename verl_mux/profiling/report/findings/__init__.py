"""What cost time and what to do about it: one function a kind, registered in all_findings.py. Runs in the report; pure."""
