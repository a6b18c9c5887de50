"""Machine translation: data, model, decoding and scores of `tasks/wmt14.py`."""
