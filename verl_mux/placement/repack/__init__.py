"""Who should move so that all groups cost less, and whether that pays. Pure; imports scheduling/model.py, time/ and search/."""
