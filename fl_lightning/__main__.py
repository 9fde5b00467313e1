"""``python -m fl_lightning``: the command line."""

from fl_lightning.commands.main import main

if __name__ == "__main__":
    main()
