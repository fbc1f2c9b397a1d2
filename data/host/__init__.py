"""Host resources of a process: cores, memory, child processes."""
