"""Commands that take their options as one dataclass."""

import functools
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def take_options(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Turn a function of one dataclass into a command whose options are the fields of the dataclass.

    Typer reads the signature and the annotations, which are `Annotated[type, typer.Option(...)]`.
    """
    hints = get_type_hints(options, include_extras=True)

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            function(options(**values))

        functools.update_wrapper(command, function)
        del command.__wrapped__  # type: ignore[attr-defined]
        command.__annotations__ = hints
        parameters = [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(options)  # type: ignore[arg-type]
        ]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate
