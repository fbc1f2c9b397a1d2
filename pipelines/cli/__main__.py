"""Entry point of `python -m pedigree.pipelines.cli`, for use without an installed command."""

from pedigree.pipelines.cli.main import main

if __name__ == "__main__":
    main()
