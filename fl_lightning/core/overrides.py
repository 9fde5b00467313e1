"""Methods of classes outside this package that override ours: whether they can be called as ours are."""

from inspect import Parameter, Signature, signature
from types import FunctionType
from weakref import WeakSet

from fl_lightning.core.errors import UserError

PACKAGE = __name__.partition(".")[0]
CHECKED = WeakSet[type]()
"""Classes in which nothing was found."""


def check_overrides(kind: type) -> None:
    """Checks that what a class overrides takes the arguments with which this package calls it.

    Raises:
        UserError: If a method takes others; it shows the right signature.
    """
    for place, owner in enumerate(kind.__mro__ if kind not in CHECKED else ()):
        for name, method in vars(owner).items() if owner.__module__.partition(".")[0] != PACKAGE else ():
            bases = (c for c in kind.__mro__[place + 1 :] if c.__module__.partition(".")[0] == PACKAGE)
            base = next((c for c in bases if name in vars(c)), None)
            ours = None if base is None or (name[0] == "_" and name != "__call__") else vars(base)[name]
            if isinstance(ours, FunctionType) and isinstance(method, FunctionType):
                wanted, given = signature(ours), signature(method)
                if not _takes(given, wanted):
                    whose = f"{base and base.__name__}.{name}"
                    shown = f"{owner.__name__}.{name}{_text(given)}"
                    raise UserError(f"{shown}: {whose} has other arguments; write def {name}{_text(wanted)}")
    CHECKED.add(kind)


def _takes(given: Signature, wanted: Signature) -> bool:
    """Returns whether a function can be called as another one; one with ``*args`` says too little."""
    parameters = wanted.parameters.values()
    if any(p.kind is Parameter.VAR_POSITIONAL for p in parameters):
        return True
    named = [p for p in parameters if p.kind is not Parameter.VAR_KEYWORD]
    for by_name in (
        [p.name for p in named if p.kind is Parameter.KEYWORD_ONLY],
        [p.name for p in named if p.kind is Parameter.KEYWORD_ONLY or p.default is not Parameter.empty],
    ):
        try:
            given.bind(*(p for p in named if p.name not in by_name), **dict.fromkeys(by_name))
            return True
        except TypeError:
            pass
    return False


def _text(of: Signature) -> str:
    bare = [p.replace(annotation=Parameter.empty) for p in of.parameters.values()]
    return str(Signature(bare))
