"""One running job: where it runs, who may write, and what happens when it fails."""
