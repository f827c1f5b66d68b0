"""Tests for the day a GPU is there (marker `gpu`, `make test-gpu`), and the same scenes on a device with a budget: scenes.py
judges, engines.py runs engines for it, on either bed."""
