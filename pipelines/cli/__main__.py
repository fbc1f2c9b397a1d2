"""Entry point of `python -m pipelines.cli`, for use without an installed command."""

from pipelines.cli.main import main

if __name__ == "__main__":
    main()
