"""Machine translation: the run of `tasks/wmt14.py`, its data, model, decoding and scores."""
