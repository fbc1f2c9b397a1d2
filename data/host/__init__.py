"""What a process uses of its machine: cores, memory, child processes."""
