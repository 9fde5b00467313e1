"""The rounds of config.yaml."""

from pathlib import Path

from fl_lightning.commands.flower import server_app

app = server_app(Path(__file__).with_name("config.yaml"))
