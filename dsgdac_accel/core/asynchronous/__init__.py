"""Asynchronous pairwise averaging: no worker waits for one that is slower."""
