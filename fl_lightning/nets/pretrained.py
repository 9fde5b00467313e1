"""Nets that start from given weights: those of Hugging Face, and nets of which some parameters are trained."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.core import (
    Checked,
    FlatSpec,
    Fraction,
    Positive,
    Size,
    UserError,
    ensure,
    folded,
    imported,
    require,
    weights,
)

KINDS = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}
"""Tasks, and the classes of transformers that make their nets."""


class HuggingFaceNet(Checked, nn.Module, key="model.net"):
    """A net of Hugging Face's ``transformers`` that classifies texts or images, from local files.

    A text is a row of tokens; those that equal ``pad_token_id`` of the config are padding, which the net does not see.
    A sample may also be several tensors by the names of the net's arguments, such as ``input_ids`` and
    ``attention_mask``. Nothing is downloaded. Needs transformers.

    Args:
        path: A folder that ``save_pretrained`` wrote, or the name of a net in the local cache. A folder with
            ``config.json`` alone gives a net with initial weights.
        task: What the net does, and so which head it has.
        num_classes: Number of classes; null: that of the config. A head of another shape than in the files has initial
            weights.
        attention: How attention is computed, such as ``eager`` or ``sdpa``; null: as transformers chooses.

    Raises:
        UserError: If there is no transformers, or no net for this task that its files describe.
    """

    def __init__(
        self,
        path: str,
        task: Literal["sequence_classification", "image_classification"] = "sequence_classification",
        num_classes: Size | None = None,
        attention: str | None = None,
    ) -> None:
        super().__init__()
        needs = "model.net = HuggingFaceNet: needs transformers; pip install 'fl-lightning[adapters]'"
        transformers = imported("transformers", needs)
        kind = getattr(transformers, KINDS[task])
        classes = {} if num_classes is None else {"num_labels": num_classes}
        attentions = {} if attention is None else {"attn_implementation": attention}
        try:
            with _quiet(transformers.utils.logging):
                config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, **classes)
                if _without_weights(Path(path)):
                    self.net = kind.from_config(config, **attentions)
                else:
                    self.net = kind.from_pretrained(
                        path, config=config, local_files_only=True, ignore_mismatched_sizes=True, **attentions
                    )
        except (OSError, ValueError, ImportError, KeyError) as error:
            remedy = "give a folder that save_pretrained wrote, or the name of a net in the local cache"
            raise UserError(f"model.net.path = {path}: {folded(error):.150}; {remedy}") from None
        self.net.float()
        self._text = task == "sequence_classification"

    def forward(self, x: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Returns logits ``(N, classes)`` of tokens ``(N, length)``, images ``(N, C, H, W)``, or tensors by name."""
        if isinstance(x, Mapping):
            arguments = dict(x)
        elif self._text:
            padding = self.net.config.pad_token_id
            arguments = {"input_ids": x} | ({} if padding is None else {"attention_mask": (x != padding).long()})
        else:
            arguments = {"pixel_values": x}
        return self.net(**arguments).logits


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Shows no progress bars of transformers, and no report on heads that the files lack."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _without_weights(path: Path) -> bool:
    """Returns whether a folder has a config, but no weights."""
    return path.is_dir() and not any(file.name.startswith(("model", "pytorch_model")) for file in path.iterdir())


FUSED = nn.MultiheadAttention, nn.TransformerEncoderLayer
"""Modules of torch that compute with the weights of their layers, without calling these."""


class Frozen(Checked, nn.Module, key="model.net"):
    """A net of which only some modules are trained.

    The weight vector of the algorithms holds the trained parameters only: the others are neither sent nor part of any
    state. A module that has parameters, all of them frozen, stays in eval mode: it drops nothing out, and BatchNorm
    normalizes by the statistics that it has. So does a norm without weights that is not named and comes before all that
    is trained.

    Args:
        net: The network.
        trained: Names of its modules or parameters that are trained, such as ``head`` or ``blocks.1``.
        weights: Pre-trained weights of ``net``: a file with its state_dict, or a checkpoint of a run that trained it.
            Trained modules that the file does not have, or in another shape, keep their initial weights.

    Raises:
        UserError: If a name matches nothing, or the weights do not fit.
    """

    def __init__(self, net: nn.Module, trained: Sequence[str | int], weights: str | None = None) -> None:
        super().__init__()
        names = [str(name) for name in trained]  # the names in nn.Sequential are numbers
        require(len(names) > 0, "model.net.trained", names, "give the names of modules to train")
        _check_names(net, names)
        load_pretrained(net, weights, names)
        self.net = net
        net.requires_grad_(False)
        for name, parameter in net.named_parameters(remove_duplicate=False):  # a shared one has several names
            if _below(name, names):
                parameter.requires_grad_()
        self._constant = [*_frozen_modules(net), *_early_norms(net, names)]
        for module in self._constant:
            for layer in module.modules():
                if isinstance(layer, _BatchNorm):  # else update_bn would reset its statistics
                    vars(layer)["track_running_stats"] = False
        self.train()

    def train(self, mode: bool = True) -> "Frozen":
        """Sets the mode of the trained modules; the others stay in eval mode."""
        super().train(mode)
        for module in self._constant:
            module.eval()
        return self

    def forward(self, x: Any) -> Any:
        """Returns the output of the net."""
        return self.net(x)


class LoRA(Frozen):
    """A net with low-rank adapters (Hu et al., ICLR 2022) by peft: a layer's ``W`` becomes ``W + alpha/rank B A``.

    Only A and B are trained, and the modules ``trained``; at first B is zero. See `Frozen`. Needs peft.

    Args:
        net: The network.
        targets: Names of the layers that get an adapter, or the ends of their names: ``q`` is ``blocks.0.q``, too.
        rank: Rank of the adapters.
        alpha: Scale of the adapters, divided by ``rank``.
        dropout: Dropout of the adapters' inputs.
        trained: As for `Frozen`; mostly the new head.
        weights: As for `Frozen`.
        factors: Which of the two are trained. B: A keeps its random initial values (FFA-LoRA; Sun et al., ICLR 2024),
            so that the mean of the clients' products ``B A`` is the product of the means.

    Raises:
        UserError: If a name matches nothing, a target cannot have an adapter, the weights do not fit, or there is no
            peft.
    """

    def __init__(
        self,
        net: nn.Module,
        targets: Sequence[str],
        rank: Size = 8,
        alpha: Positive = 16.0,
        dropout: Fraction = 0.0,
        trained: Sequence[str | int] = (),
        weights: str | None = None,
        factors: Literal["A and B", "B"] = "A and B",
    ) -> None:
        peft = imported("peft", "model.net = LoRA: needs peft; pip install 'fl-lightning[adapters]'")
        names = [str(name) for name in trained]
        _check_names(net, names)
        _check_targets(net, targets)
        load_pretrained(net, weights, names)
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), lora_dropout=dropout)
        try:
            net = peft.inject_adapter_in_model(config, net)
        except ValueError as error:  # peft's own text says which layer
            raise UserError(f"model.net.targets = {list(targets)}: {str(error).splitlines()[0]:.150}") from None
        kinds = "lora_" if factors == "A and B" else "lora_B"
        super().__init__(net, [*names, *(name for name, _ in net.named_parameters() if kinds in name)])

    def merged(self, at: Tensor | None = None) -> nn.Module:
        """Returns a copy of the net without adapters: its layers have the weights ``W + alpha/rank B A``.

        These weights require gradients, and those of the modules ``trained``; so `fl_lightning.flatness` measures the
        loss as a function of them, whatever factors have led there.

        Args:
            at: Trained weights ``(d,)`` of this net; by default those that it has.
        """
        net = deepcopy(self.net)
        if at is not None:
            FlatSpec(net).load(net, at)
        for name, layer in [*net.named_modules()]:
            if hasattr(layer, "get_base_layer"):
                base = layer.get_base_layer()
                base.weight = nn.Parameter(base.weight.detach().clone())  # another layer may share it
                layer.merge()
                base.weight.requires_grad_()
                net.set_submodule(name, base)
        return net


def load_pretrained(net: nn.Module, source: str | None, trained: Sequence[str]) -> None:
    """Loads pre-trained weights into a net.

    Args:
        net: The network.
        source: A file as for `Frozen`; None: nothing is loaded.
        trained: Names of what may be missing in the file, or there in another shape.

    Raises:
        UserError: If they do not fit.
    """
    if source is not None:
        key = "model.net.weights"
        state = weights.named(source, key, net.state_dict().keys())
        weights.load(net, state, key, head=tuple(n for n in (*net.state_dict(), *state) if _below(n, trained)))


def _check_names(net: nn.Module, trained: Sequence[str]) -> None:
    names = [name for find in (net.named_parameters, net.named_buffers) for name, _ in find(remove_duplicate=False)]
    known = ", ".join({name.partition(".")[0]: None for name in names})
    for name in trained:
        fits = any(_below(parameter, [name]) for parameter in names)
        require(fits, "model.net.trained", name, f"no parameters of that name in {type(net).__name__}; it has {known}")


def _check_targets(net: nn.Module, targets: Sequence[str]) -> None:
    modules = dict(net.named_modules())
    for target in targets:
        matches = [name for name in modules if f".{name}".endswith(f".{target}")]
        require(len(matches) > 0, "model.net.targets", target, f"no layer of that name in {type(net).__name__}")
        for module in (modules[path] for name in matches for path in (name, name.rpartition(".")[0])):
            ensure(
                not isinstance(module, FUSED),
                f"model.net.targets = {target}: {type(module).__name__} does not call its layers, so that adapters "
                "would have no effect; choose others, or a net of plain linear layers, such as TextTransformer",
            )


def _below(parameter: str, names: Collection[str]) -> bool:
    """Returns whether a parameter has one of these names, or lies in a module of one of these names."""
    return any(parameter == name or parameter.startswith(f"{name}.") for name in names)


def _frozen_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules that have parameters but train none."""
    trained = [p.requires_grad for p in module.parameters()]
    if trained and not any(trained):
        yield module
    else:
        for child in module.children():
            yield from _frozen_modules(child)


def _early_norms(net: nn.Module, trained: Collection[str]) -> Iterator[nn.Module]:
    """Yields modules with running statistics but no parameters, if they are not named and precede all trained ones."""
    for name, module in net.named_modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            return
        if getattr(module, "track_running_stats", False) and not [*module.parameters()] and not _below(name, trained):
            yield module
