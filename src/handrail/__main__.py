"""Run the command-line program `handrail` as `python -m handrail`."""

from handrail.cli import main

if __name__ == "__main__":
    main()
