"""Calls with a wrong argument say which was meant.

Python's own words for one (`got an unexpected keyword argument 'timeout'`) are no error of ours and name nothing that
is there. Signatures stay as they are written: the class decorator changes nothing that a type checker sees.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import update_wrapper, wraps
from types import FunctionType, MethodType
from typing import Any, Final, NoReturn, Protocol, TypeVar

from dsec.model.errors import InvalidSpec, no_attribute

T = TypeVar("T")
E = TypeVar("E", bound="Enters")
F = TypeVar("F", bound=Callable[..., Any])

# As in `inspect`, which takes longer to import than a local call.
_COROUTINE: Final = 0x80
_ANY_KEYWORD: Final = 0x08


class Enters(Protocol):
    """What `async with` takes."""

    async def __aenter__(self) -> Any: ...
    async def __aexit__(self, *error: Any) -> bool | None: ...


class Awaited(Coroutine[Any, Any, E]):
    """What an async call returns whose result is entered: awaited it gives that, and `async with` awaits it itself."""

    def __init__(self, coroutine: Coroutine[Any, Any, E]) -> None:
        self._coroutine = coroutine
        self._result: E | None = None

    # A coroutine as any other, also for `asyncio.create_task`.

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, E]:
        return self._coroutine.__await__()

    async def __aenter__(self) -> E:
        self._result = result = await self._coroutine
        await result.__aenter__()
        return result

    async def __aexit__(self, *error: Any) -> bool | None:
        assert self._result is not None, "was entered"
        return await self._result.__aexit__(*error)

    def __getattr__(self, name: str) -> NoReturn:
        call = getattr(self._coroutine, "__name__", "call") if name != "_coroutine" else "call"
        text = f"{call}() was not awaited, and has no attribute {name!r}; `await {call}(...)` gives what has"
        raise AttributeError(text, name=name, obj=self)


class Made(type):
    """Of a class of which a client makes the objects: who asks the class itself is told so."""

    def __getattr__(cls, name: str) -> NoReturn:
        from dsec.model.words import of_class

        text = f"type object {cls.__name__!r} has no attribute {name!r}"
        raise AttributeError(text + ("" if name.startswith("_") else of_class(name, cls.__name__)), name=name, obj=cls)


class _Asked:
    """A method of which others have an object: it is called as any, and says what is ours to who asks it for more."""

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self._function = function

    def __get__(self, of: object, cls: type | None = None) -> _Asked:
        return self if of is None else _Asked(MethodType(self._function, of))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> NoReturn:
        from dsec.model.words import of_method

        text = f"{self.__name__} is a method, and has no attribute {name!r}"
        hint = "" if name.startswith("_") else of_method(name, _words_key(self.__qualname__))
        raise AttributeError(text + hint, name=name, obj=self)


def asked(function: F) -> F:
    """A method that others have as an object (`sandbox.process.exec`): `explained` makes it one that says so."""
    function.asked = True  # type: ignore[attr-defined]  # functions have attributes
    return function


def _words_key(qualname: str) -> str:
    """How the tables of words call a method: `Process.wait_for`, of both twins."""
    return qualname.rpartition("<locals>.")[2].removeprefix("Async")


class WrongArgument(InvalidSpec, TypeError):
    """InvalidSpec that is Python's own error for it, too."""


def explained(cls: type[T]) -> type[T]:
    """The class itself; its constructor and public methods raise InvalidSpec for arguments they do not have."""
    for name, function in list(vars(cls).items()):
        if isinstance(function, FunctionType) and (name == "__init__" or not name.startswith("_")):
            explains = _explained(function, cls.__name__ if name == "__init__" else name)
            setattr(cls, name, _Asked(explains) if getattr(function, "asked", False) else explains)
    cls.__getattr__ = no_attribute  # type: ignore[attr-defined]  # of any class: asked for what it does not have
    return cls


def called(on_output: Callable[[int, bytes], Any], stream: int, data: bytes) -> Any:
    """What a caller's `on_output` answers. Raises what it raises, and WrongArgument when it does not take these two."""
    try:
        return on_output(stream, data)
    except TypeError as error:
        if not _of_the_call(error):
            raise
        text = f"on_output: {error}; it is called as on_output(stream, data), with 1 or 2 and bytes"
        raise WrongArgument(text, detail={"field": "on_output"}) from error


def _of_the_call(error: TypeError) -> bool:
    """Whether it is of the call itself: one from within the function has been in its frame, and is somebody else's."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def _explained(function: FunctionType, name: str) -> Callable[..., Any]:
    if function.__code__.co_flags & _COROUTINE:

        @wraps(function)
        async def waiting(*args: Any, **kwargs: Any) -> Any:
            try:
                made = function(*args, **kwargs)
            except TypeError as error:
                if wrong := _wrong(error, function, name, args, kwargs):
                    raise wrong from None
                raise
            return await made

        if not getattr(function, "entered", False):
            return waiting

        @wraps(function)
        def entered(*args: Any, **kwargs: Any) -> Any:
            return Awaited(waiting(*args, **kwargs))

        return entered

    @wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if wrong := _wrong(error, function, name, args, kwargs):
                raise wrong from None
            raise

    return plain


def _wrong(
    error: TypeError, function: FunctionType, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> WrongArgument | None:
    """What is wrong with the arguments; None: it is not that, or Python's words name it (one that is missing)."""
    if not _of_the_call(error):
        return None
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    placed, named = code.co_varnames[1 : code.co_argcount], code.co_varnames[code.co_argcount : count]
    key = _words_key(function.__qualname__)
    unknown = None
    if not code.co_flags & _ANY_KEYWORD:
        unknown = next((word for word in kwargs if word not in (*placed, *named)), None)
    elif len(args) < code.co_posonlyargcount:
        # Not named by Python's words either, to whom it was given by name: `create_many(n=8)`.
        first = code.co_varnames[len(args)]
        return WrongArgument(f"{name}() lacks {first}, which stands first, without a name", detail={"field": first})
    if unknown is not None:
        from dsec.model.words import makes, meant

        has = f"it has {', '.join((*placed, *named))}" if placed or named else "it has none"
        text = f"{name}() has no argument {unknown}{meant(unknown, (*placed, *named), key)} ({has}){makes(name)}"
        return WrongArgument(text, detail={"field": unknown})
    if len(args) > code.co_argcount:
        text = f"{name}() has {len(args) - 1} arguments without a name, and takes {', '.join(placed) or 'none'} so"
        if named:
            text += f"; the others go by name: {', '.join(f'{word}=' for word in named)}"
        if placed == ("command",):
            text += "; a program and its arguments are one list"
        return WrongArgument(text, detail={"field": placed[-1] if placed else None})
    return _lacks(function, name, placed, len(args) - 1, kwargs)


def _lacks(
    function: FunctionType, name: str, placed: tuple[str, ...], given: int, kwargs: dict[str, Any]
) -> WrongArgument | None:
    """What is missing, where there is more to say than that."""
    from dsec.model.words import makes, without

    needed = placed[: len(placed) - len(function.__defaults__ or ())]
    lacking = next((word for word in needed[given:] if word not in kwargs), None)
    if lacking is None or not (hint := makes(name) or without(_words_key(function.__qualname__), lacking)):
        return None
    return WrongArgument(f"{name}() lacks {lacking}{hint}", detail={"field": lacking})
