"""Language models on English texts that are installed with Python and NumPy: settings, data, and training."""
