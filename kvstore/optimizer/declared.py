"""Optimizers that declare their settings in the body of the class, from which the constructor is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .checks import DeclaredSetting, setting
from .optimizer import Optimizer

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[type], type]:
        """Do nothing: type checkers read the decorator."""
        return lambda klass: klass


def keyword(default: Any = None, *, alias: str = "", kw_only: bool = True) -> Any:
    """Declare a keyword of all constructors for type checkers.

    `alias` is its name if the attribute has another.
    """
    return default


@dataclass_transform(field_specifiers=(setting, keyword))
class DeclaredOptimizer(Optimizer):
    """Base of optimizers whose classes declare their settings.

    A class with declared settings gets a constructor, unless it defines one. Its arguments are the learning
    rate, the settings of the bases, those of the class, and the keywords of `Optimizer`.
    """

    _declared: ClassVar[Mapping[str, DeclaredSetting]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        own = {name: value for name, value in vars(cls).items() if isinstance(value, DeclaredSetting)}
        for name, value in own.items():
            delattr(cls, name)
            value.annotation = cls.__annotations__[name]
        above = (base._declared for base in reversed(cls.__bases__) if issubclass(base, DeclaredOptimizer))
        cls._declared = {name: value for table in (*above, own) for name, value in table.items()}
        cls.settings = {**{name: value.check for name, value in own.items()}, **vars(cls).get("settings", {})}
        if own and "__init__" not in vars(cls):
            cls.__init__ = _make_constructor(cls._declared)  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)

    def __post_init__(self) -> None:
        """Finish the construction, after all settings are assigned; a hook for subclasses."""


def _make_constructor(declared: Mapping[str, DeclaredSetting]) -> Callable[..., None]:
    made = inspect.Parameter
    usual = made.POSITIONAL_OR_KEYWORD
    own = [made(n, usual, default=one.default, annotation=one.annotation) for n, one in declared.items()]
    rate = made("learning_rate", usual, default=None, annotation="float | None")
    common = made("common", made.VAR_KEYWORD, annotation="Any")
    signature = inspect.Signature([made("self", usual), rate, *own, common], return_annotation="None")

    def __init__(*args: Any, **keywords: Any) -> None:  # noqa: N807 - a constructor
        given = signature.bind(*args, **keywords)
        given.apply_defaults()
        self, learning_rate, *values, others = given.arguments.values()
        Optimizer.__init__(self, learning_rate=learning_rate, **others)
        self._store_settings(**dict(zip(declared, values, strict=True)))
        self.__post_init__()

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__
