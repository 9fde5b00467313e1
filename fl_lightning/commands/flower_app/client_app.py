"""Trains the clients of a node."""

from pathlib import Path

from fl_lightning.commands.flower import client_app

app = client_app(Path(__file__).with_name("config.yaml"))
