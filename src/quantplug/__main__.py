"""`python -m quantplug` is the command line too."""

from quantplug.cli import main

if __name__ == "__main__":
    main()
