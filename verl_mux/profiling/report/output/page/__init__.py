"""The report as one HTML file: what it shows (data.py and its neighbours), and the scripts that draw it."""
