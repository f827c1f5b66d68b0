"""The cheapest division of the jobs of a moment, for policies to be measured against. Offline; imports the decisions of
scheduling/ for how long groups take, none of its searches."""
