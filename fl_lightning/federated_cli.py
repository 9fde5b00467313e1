"""LightningCLI for the federated trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from json import dumps
from typing import Any, NoReturn

import torch
from jsonargparse import ActionConfigFile, ArgumentParser  # type: ignore[attr-defined]
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import fl_lightning.algorithms
import fl_lightning.data
import fl_lightning.nets
from fl_lightning.catalogue import show
from fl_lightning.cli import COMMANDS, EPILOG
from fl_lightning.errors import require
from fl_lightning.messages import ArgumentsError, find_user_error
from fl_lightning.objective import LocalObjective
from fl_lightning.plan import plan
from fl_lightning.rng import generator
from fl_lightning.trainer import FederatedTrainer


class Parser(LightningArgumentParser):
    """A parser whose errors are one line for people, and that takes no abbreviated names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Refuse the arguments."""
        raise find_user_error(ex) or ArgumentsError(message)


class FederatedCLI(LightningCLI):
    """LightningCLI over `FederatedTrainer`, `LocalObjective` and `FederatedDataModule`, in subclass mode.

    One seed, ``trainer.seed``, takes the place of ``seed_everything``; the resolved config goes to the run folder and
    to the loggers.
    """

    def __init__(self, args: Sequence[str] | None = None) -> None:
        super().__init__(
            model_class=LocalObjective,
            datamodule_class=fl_lightning.data.FederatedDataModule,
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]
            parser_class=Parser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=None if args is None else list(args),
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Methods of the trainer (`plan`: of this class) that are subcommands, with the arguments from elsewhere."""
        return {name: {"model", "datamodule"} for name in ("fit", "centralized", "validate", "test", "plan")}

    def init_parser(self, **kwargs: Any) -> Parser:
        """A parser with ``--config``."""
        parser = Parser(dump_header=["fl_lightning"], **kwargs)
        parser.add_argument("-c", "--config", action=ActionConfigFile, help="A YAML file with any of these settings.")
        return parser

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """The main parser, the trainer's subcommands, and ``list``."""
        self.parser = Parser(
            prog="fl-lightning",
            description="Federated learning with flat minima.",
            epilog=EPILOG,
        )
        self._subcommand_parsers: dict[str, LightningArgumentParser] = {}
        self._subcommand_method_arguments: dict[str, list[str]] = {}
        commands = self.parser.add_subcommands()
        for name in self.subcommands():
            summary = COMMANDS[name]
            owner = FederatedCLI if name == "plan" else FederatedTrainer
            parser = self._prepare_subcommand_parser(owner, name, description=summary)
            self._subcommand_parsers[name] = parser
            commands.add_subcommand(name, parser, help=summary)
        summary = COMMANDS["list"]
        commands.add_subcommand("list", ArgumentParser(description=summary), help=summary)

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """None beside the classes' own: the seed is ``trainer.seed``."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Arguments of trainer, model and data."""
        # LightningArgumentParser.add_lightning_class_args refuses a trainer that is not a lightning.Trainer
        parser.add_class_arguments(FederatedTrainer, "trainer", instantiate=False, fail_untyped=False, sub_configs=True)
        parser.add_lightning_class_args(self._model_class, "model", subclass_mode=True)
        parser.add_lightning_class_args(self._datamodule_class, "data", subclass_mode=True)

    def _parse_ckpt_path(self) -> None:
        """Checkpoints are read by the trainer, which says what is wrong with one."""

    def _set_seed(self) -> None:
        """Initial weights follow ``trainer.seed``; everything later has a generator of its own."""
        if self.subcommand != "list":
            settings = self.config[self.subcommand].trainer
            require(hasattr(settings, "seed"), "trainer", settings, "give a mapping of settings")
            seed = self.config[self.subcommand].trainer.seed
            torch.manual_seed(generator(seed, "initial weights").initial_seed())

    def before_instantiate_classes(self) -> None:
        """A plan is measured on one process; how many the config asks for is what it is made for."""
        if self.subcommand == "plan":
            given = self.config.plan
            for key, name in (("devices", "devices"), ("nodes", "num_nodes")):
                if given[key] is None:
                    asked = str(given.trainer[name])
                    require(asked.isdecimal(), f"trainer.{name}", asked, f"say how many by --{key}")
                    given[key] = int(asked)
                given.trainer[name] = 1
            given.trainer.strategy = "auto"

    def instantiate_classes(self) -> None:
        """Make model, data and trainer; the trainer gets the resolved config."""
        if self.subcommand == "list":
            return
        super().instantiate_classes()
        self._dump_config()
        self.config_dump.pop("ckpt_path", None)
        self.config_dump.pop("config", None)
        self.trainer.config = self.config_dump  # type: ignore[attr-defined]

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand == "list":
            show()
        elif subcommand == "plan":
            self.plan(**self._prepare_subcommand_kwargs(subcommand))
        else:
            super()._run_subcommand(subcommand)

    def plan(
        self,
        model: LocalObjective,
        datamodule: fl_lightning.data.FederatedDataModule,
        devices: int | None = None,
        nodes: int | None = None,
        bandwidth: float = 10.0,
        json: bool = False,
    ) -> None:
        """Predict hours, memory and bits of a fit.

        Args:
            model: The local objective.
            datamodule: The clients' data.
            devices: Devices (processes) per node; null: trainer.devices.
            nodes: Nodes; null: trainer.num_nodes.
            bandwidth: Between nodes, in Gbit/s.
            json: Print one line of JSON instead of a table.
        """
        assert devices is not None and nodes is not None
        trainer: Any = self.trainer
        made = plan(trainer, model, datamodule, devices, nodes, bandwidth)
        if json:
            print(dumps(asdict(made) | {"seconds": made.seconds}))
        else:
            made.show()
