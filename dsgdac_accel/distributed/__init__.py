"""The processes that hold the workers: how they start, meet, notice that one is lost, and stop together."""
