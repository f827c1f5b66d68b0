"""What was measured, without judging: `Analysis` holds it all, computed once from input/'s tables. Runs in the report; pure."""
