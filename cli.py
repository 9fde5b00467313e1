"""The command line from a checkout: ``python cli.py fit --config configs/quickstart.yaml``."""

from fl_lightning.commands.main import main

if __name__ == "__main__":
    main()
