"""The evaluations of three papers, measured again: what ``paper.py`` runs and draws."""
