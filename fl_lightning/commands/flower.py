"""``fl-lightning flower``: a run as a Flower app."""

import re
import shlex
from functools import cache, partial
from pathlib import Path
from string import Template
from typing import Any

import yaml

from fl_lightning.commands.shared import FederatedCLI
from fl_lightning.core import LEFT_OUT, ensure
from fl_lightning.flower import server
from fl_lightning.results import flatten, say, write_new
from fl_lightning.trainer import Run

TEMPLATE = Path(__file__).parent / "flower_app"
ON_NODE = ("--trainer.callbacks=null", "--trainer.loggers=null", "--trainer.enable_progress_bar=false")
"""Settings of a node, in place of the run's."""


def run(cli: FederatedCLI, folder: str, /, nodes: int | None = None) -> None:
    """Writes an app for ``flwr run``: config, ClientApp and ServerApp.

    Args:
        cli: Builds the run, which shows what does not fit before anything is written.
        folder: The app's folder; it is created.
        nodes: Number of nodes, among which the clients are divided: client k is on node k mod nodes; null: a node for
            each client.
    """
    objects = cli.build()
    server.check(objects.trainer, objects.model, objects.data)
    if nodes is not None:
        objects.data.setup()  # only now some data know how many clients they have
    server.check_nodes(nodes, objects.data)
    config, engine = objects.trainer.config, objects.trainer.engine
    secrets = [key for key, value in flatten(config).items() if LEFT_OUT.search(value)]
    ensure(not secrets, f"{', '.join(secrets)}: every node would get this secret; leave it out, give it by environment")
    config["trainer"]["engine"] = "sequential" if engine == "auto" else engine
    name = re.sub(r"[^a-z0-9]+", "-", Path(folder).resolve().name.lower()).strip("-") or "app"
    files = {
        path.name.removesuffix(".in"): Template(path.read_text(encoding="utf-8")).substitute(
            name=name, nodes=nodes or 0
        )
        for path in sorted(TEMPLATE.iterdir())
        if path.is_file()
    }
    write_new(folder, {"config.yaml": yaml.safe_dump(config, sort_keys=False), **files})
    say(f"start with: flwr run {shlex.quote(folder)}")


def client_app(config: str | Path) -> Any:
    """Returns Flower's ClientApp of a config; needs flwr.

    Args:
        config: The file.
    """
    from fl_lightning.flower import app

    return app.client_app(partial(_node_run, str(config)))


def server_app(config: str | Path) -> Any:
    """Returns Flower's ServerApp of a config; needs flwr.

    Args:
        config: The file.
    """
    from fl_lightning.flower import app

    return app.server_app(partial(_build, config))


def _build(config: str | Path, *settings: str) -> Any:
    return FederatedCLI("fit", "--config", str(config), *settings).build()


@cache
def _node_run(config: str) -> Run:
    objects = _build(config, *ON_NODE)
    return objects.trainer.load(objects.model, objects.data, None)  # type: ignore[no-any-return]
