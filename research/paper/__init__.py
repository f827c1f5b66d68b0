"""Reruns what the RollMux paper (arXiv 2512.11306v2) lets one rerun without its testbed. See README.md."""
