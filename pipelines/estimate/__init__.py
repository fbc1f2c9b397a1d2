"""What a stage needs before it runs: memory, tokens, time, disk. Pure functions of configs and numbers; loads no library."""
