"""How long an iteration takes in a co-execution group: settled periods, whether they keep every SLO, and the group as it stands
run forward. Pure; imports scheduling/model.py alone."""
