"""How much memory jobs will need, computed before they run: from verl configs and models' config.json to bytes on each GPU and
host of the nodes they share. Pure; formulas with their sources in docs/memory.md."""
