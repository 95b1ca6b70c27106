"""Looking at runs: the page, the figures, the tables. Only ``analysis`` needs torch."""
