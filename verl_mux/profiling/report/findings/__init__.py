"""What cost time and what to do about it: one function a kind, registered in all_findings.py. Pure, over measures/; `Sifted`
holds what several kinds derive from an Analysis.
"""
