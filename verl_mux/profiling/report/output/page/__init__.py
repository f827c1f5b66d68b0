"""The report as one HTML file: page.py and requests.py gather what it shows, the scripts draw it."""
