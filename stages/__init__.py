"""One module per kind of stage: an ordinary `run` function from config and input artifacts to a payload."""
