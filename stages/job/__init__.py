"""The inside of a job: its inputs, its reports, its checkpoints on their way to a store, checks of its output."""
