"""The registry of backends: rows of data. A class is imported when it is asked for, not before."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from attn import outside
from attn.backends.base import AttentionBackend
from attn.errors import BackendPackageError, MissingDependencyError, UnknownBackendError, one_line
from attn.outside import Offer
from specs.devices import DeviceKind
from specs.names import find_name, near_miss

B = TypeVar("B", bound=type[AttentionBackend])

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackendRow:
    """One backend: its name, the path of its class, and the modules that it needs."""

    name: str
    path: str = ""
    """``package.module:Class``, or ``package.module.Class`` as vLLM writes it; empty for a mix of
    two backends."""
    aliases: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    """Top-level modules that must be importable."""
    prefill: str | None = None
    """For a mix of two backends: name of the backend of every request that is not a decode."""
    decode: str | None = None
    """For a mix of two backends: name of the backend of the decodes."""
    ranks: Mapping[str, int] = field(default_factory=dict, hash=False)
    """For a backend of another package: its place in the automatic choice for each kind of device,
    such as ``{"sm90": 1}``. Rank 1 comes before the library's first, rank 2 between its first and
    its second. A kind that is not named does not choose the backend automatically."""


ROWS: tuple[BackendRow, ...] = (
    BackendRow(
        "TRITON_ATTN",
        "attn.backends.triton_attn:TritonAttentionBackend",
        requires=("triton",),
    ),
    BackendRow(
        "TRITON_MLA",
        "attn.backends.triton_mla:TritonMLABackend",
        requires=("triton",),
    ),
    BackendRow(
        "FLASHINFER",
        "attn.backends.flashinfer:FlashInferBackend",
        requires=("flashinfer",),
    ),
    BackendRow(
        "TRTLLM_MHA",
        "attn.backends.trtllm_mha:TrtllmMhaBackend",
        requires=("flashinfer",),
    ),
    BackendRow(
        "FLASHINFER_MLA",
        "attn.backends.flashinfer_mla:FlashInferMlaBackend",
        requires=("flashinfer", "triton"),
    ),
    BackendRow(
        "TRTLLM_MLA",
        "attn.backends.trtllm_mla:TrtllmMlaBackend",
        requires=("flashinfer", "triton"),
    ),
    BackendRow(
        "SPARSE_MLA",
        "attn.backends.sparse_mla:SparseMLABackend",
        aliases=("NSA", "DSA"),
        requires=("triton",),
    ),
    BackendRow("TORCH_REF", "attn.backends.torch_ref:TorchRefBackend"),
    BackendRow("TORCH_REF_MLA", "attn.backends.torch_ref_mla:TorchRefMLABackend"),
    BackendRow(
        "TORCH_REF_SPARSE_MLA",
        "attn.backends.torch_ref_mla:TorchRefSparseMLABackend",
        aliases=("TORCH_REF_NSA", "TORCH_REF_DSA"),
    ),
)
"""The library's own backends. A new backend needs a row here and the three files of its stem."""


class RegisteredBackend:
    """An entry of the registry, which is equal to itself alone, like an enum member."""

    def __init__(self, row: BackendRow, package: str | None = None) -> None:
        """
        Args:
            row: the row that the library, or another package, ships under this name.
            package: the other package and its version, in words; None for the library's own.
        """
        self.row = row
        self.package = package
        self._override: str | None = None
        self._mix: tuple[tuple[type[AttentionBackend], ...], type[AttentionBackend]] | None = None

    @property
    def name(self) -> str:
        """Name of the backend in the registry."""
        return self.row.name

    def __repr__(self) -> str:
        return f"<AttentionBackendEnum.{self.name}: {self.get_path()!r}>"

    def get_path(self, include_classname: bool = True) -> str:
        """Import path in force: the override if there is one, else the shipped path."""
        path = self._override or self.row.path
        return path if include_classname else _split(path)[0]

    def is_overridden(self) -> bool:
        """True when a third party replaced the class."""
        return self._override is not None

    def clear_override(self) -> None:
        """Go back to the shipped class."""
        self._override = None

    def override(self, path: str) -> None:
        """Replace the class by another import path."""
        self._override = path

    @property
    def is_third_party(self) -> bool:
        """True when the class in force is not one that the library ships."""
        return self.is_overridden() or self.row not in ROWS

    def missing(self) -> list[str]:
        """Modules that this backend needs and that cannot be found; [] when all are found."""
        if self.is_overridden():
            return []
        required = list(self.row.requires)
        for name in (self.row.prefill, self.row.decode):
            if name is not None:
                required += AttentionBackendEnum[name].row.requires
        unique = dict.fromkeys(required)
        return [name for name in unique if importlib.util.find_spec(name) is None]

    def get_class(self) -> type[AttentionBackend]:
        """Import the backend class.

        Raises:
            MissingDependencyError: an optional package is not installed.
            ImportError: the module cannot be imported, or has no such class.
            TypeError: the path leads to something that is no ``AttentionBackend``.
            ValueError: ``get_name`` of the class gives another name. A class that overrides a
                shipped class may have a name of its own.
        """
        missing = self.missing()
        if missing:
            raise MissingDependencyError(missing[0], f"backend {self.name}")
        phases = self.row.prefill, self.row.decode
        if phases[0] is not None and phases[1] is not None and not self.is_overridden():
            return self._mixed(phases[0], phases[1])
        module, name = _split(self.get_path())
        cls = getattr(importlib.import_module(module), name, None)
        if cls is None:
            raise ImportError(f"cannot import name {name!r} from {module!r}")
        return _checked(cls, self.get_path(), None if self.is_overridden() else self.name)

    def _mixed(self, prefill: str, decode: str) -> type[AttentionBackend]:
        """The class that mixes two backends; made again only when one of the two was overridden."""
        from attn.backends.mixed import mix

        pair = tuple(AttentionBackendEnum[name].get_class() for name in (prefill, decode))
        if self._mix is None or self._mix[0] != pair:
            self._mix = pair, mix(self.name, *pair)
        return self._mix[1]


def _checked(cls: object, path: str, name: str | None) -> type[AttentionBackend]:
    """Check that ``cls`` is a backend, and that it calls itself ``name`` unless that is None."""
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        raise TypeError(f"{path} is no AttentionBackend, got {cls!r}")
    if name is not None and cls.get_name() != name:
        raise ValueError(
            f"get_name() of {path} must be {name!r}, the name it is registered under, "
            f"got {cls.get_name()!r}"
        )
    return cls


def _split(path: str) -> tuple[str, str]:
    module, colon, name = path.partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    if not module or not name:
        raise ValueError(f"backend path must be 'package.module:Class', got {path!r}")
    return module, name


@dataclass
class BackendRegistry:
    """Backends by name, accessed like vLLM's ``AttentionBackendEnum``.

    ``registry.TORCH_REF`` and ``registry["TORCH_REF"]`` give a backend; iteration goes in order of
    registration. Names and aliases are found in upper or lower case.

    Backends of other packages are found by their entry points. The registry reads the entry points
    once: when it is asked for a name that it does not know, for all names, or for their number.
    """

    group: str | None = None
    """Entry-point group of other packages' backends; None: the registry reads no entry points."""
    _members: dict[str, RegisteredBackend] = field(default_factory=dict)
    _aliases: dict[str, str] = field(default_factory=dict)
    _broken: dict[str, BackendPackageError] = field(default_factory=dict)
    _has_read: bool = False
    _is_reading: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    def add(self, row: BackendRow, package: str | None = None) -> RegisteredBackend:
        """Register a new name.

        Args:
            row: the row of the backend.
            package: the package that offers it and its version, in words; None for this library's
                own backends and for those that are registered by a call.

        Raises:
            ValueError: a name or alias is taken or is no identifier; a mix lacks one of its two
                backends, or names one that is not registered or is a mix itself; a rank is below 1,
                or for a kind of device that does not exist.
        """
        names = (row.name, *row.aliases)
        for index, name in enumerate(names):
            if not name.isidentifier() or name.startswith("_"):
                raise ValueError(f"backend name must be an identifier, got {name!r}")
            if self._known(name) is not None or find_name(name, names[:index]) is not None:
                raise ValueError(f"backend name {name!r} is registered already")
        if row.prefill is None and row.decode is None:
            _split(row.path)
        else:
            self._check_mix(row)
        _check_ranks(row)
        member = RegisteredBackend(row, package)
        self._members[row.name] = member
        self._aliases.update(dict.fromkeys(row.aliases, row.name))
        return member

    def _check_mix(self, row: BackendRow) -> None:
        if row.path or row.prefill is None or row.decode is None:
            raise ValueError(
                f"backend {row.name!r} must have a path, or both prefill and decode, got "
                f"path={row.path!r}, prefill={row.prefill!r}, decode={row.decode!r}"
            )
        for phase, name in (("prefill", row.prefill), ("decode", row.decode)):
            if name not in self:
                known = ", ".join(self._members)
                raise ValueError(f"{phase} must be a registered backend, got {name!r}: {known}")
            if self[name].row.prefill is not None:
                raise ValueError(f"{phase} must be no mix of two backends itself, got {name!r}")

    def remove(self, name: str) -> None:
        """Remove a backend and its aliases."""
        row = self[name].row
        del self._members[row.name]
        for alias in row.aliases:
            del self._aliases[alias]

    @property
    def broken(self) -> dict[str, BackendPackageError]:
        """What is wrong with backends that other packages offer, by the name of the entry point."""
        self._read_packages()
        return dict(self._broken)

    def _known(self, name: object) -> RegisteredBackend | None:
        """The backend of that name or alias, without a look at other packages."""
        found = find_name(name, (*self._members, *self._aliases))
        return None if found is None else self._members[self._aliases.get(found, found)]

    def _read_packages(self, asked: object = None) -> None:
        """Add the backends of other packages, once; log a line for each that cannot be used.

        Args:
            asked: name that the caller raises the error of, which is then not logged too.
        """
        if self._has_read or self.group is None:
            return
        with self._lock:
            # A package that looks up a backend while it is imported sees what is there so far.
            if self._has_read or self._is_reading:
                return
            self._is_reading = True
            try:
                for offer in outside.offers(self.group):
                    self._take(offer)
                self._has_read = True
            finally:
                self._is_reading = False
        raised = find_name(asked, self._broken) if self._known(asked) is None else None
        for name, error in self._broken.items():
            if name != raised:
                logger.warning("%s", error)

    def _take(self, offer: Offer) -> None:
        try:
            row = offer.load()
            if not isinstance(row, BackendRow):
                raise offer.error(f"the entry point must lead to a BackendRow, got {row!r}")
            if row.name != offer.name:
                raise offer.error(f"the entry point's name must be the row's, {row.name!r}")
            try:
                self.add(row, offer.package)
            except ValueError as error:
                raise offer.error(one_line(error)) from error
        except BackendPackageError as error:
            self._broken.setdefault(offer.name, error)

    def __getitem__(self, name: str) -> RegisteredBackend:
        """The backend of that name or alias.

        Raises:
            UnknownBackendError: no such backend; the message lists the names.
            BackendPackageError: another package offers a backend of that name that cannot be used.
        """
        member = self._known(name)
        if member is None:
            self._read_packages(asked=name)
            member = self._known(name)
        if member is not None:
            return member
        broken = find_name(name, self._broken)
        if broken is not None:
            raise self._broken[broken]
        names = (*self._members, *self._aliases)
        known = ", ".join(self._members)
        raise UnknownBackendError(
            f"unknown attention backend {name!r}{near_miss(name, names)}; registered: {known}"
        )

    def __getattr__(self, name: str) -> RegisteredBackend:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __contains__(self, name: object) -> bool:
        if self._known(name) is not None:
            return True
        self._read_packages()
        return self._known(name) is not None

    def __iter__(self) -> Iterator[RegisteredBackend]:
        self._read_packages()
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        self._read_packages()
        return len(self._members)


def _check_ranks(row: BackendRow) -> None:
    kinds = [kind.value for kind in DeviceKind]
    for kind, rank in row.ranks.items():
        if kind not in kinds:
            raise ValueError(
                f"rank for unknown kind of device {str(kind)!r}{near_miss(kind, kinds)}; expected "
                f"one of {', '.join(kinds)}"
            )
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank for {kind} must be an integer from 1, got {rank!r}")


AttentionBackendEnum = BackendRegistry(outside.GROUP)
"""The registry of this process; it has vLLM's name because it is used in the same way."""
for _row in ROWS:
    AttentionBackendEnum.add(_row)


def register_mix(name: str, *, prefill: str, decode: str) -> type[AttentionBackend]:
    """Register a mix of two backends: one takes the decodes, the other every other request.

    The mix is used when it is asked for by name, and never chosen automatically.

    Args:
        name: new registry name.
        prefill: name of the backend of every request that is not a decode.
        decode: name of the backend of the decodes.

    Returns:
        The backend class of the mix.

    Raises:
        ValueError: the name is taken, or a backend is not registered.
        UnsupportedError: the two cannot share a KV cache; the error holds every reason.
        MissingDependencyError: one of the two needs a package that is not installed.
    """
    member = AttentionBackendEnum.add(BackendRow(name, prefill=prefill, decode=decode))
    try:
        return member.get_class()
    except Exception:
        AttentionBackendEnum.remove(name)
        raise


def register_backend(
    name: str, class_path: str | None = None, *, requires: tuple[str, ...] = ()
) -> Callable[[B], B]:
    """Register a third party's backend, or replace the class behind an existing name.

    With ``class_path`` the function registers at once; without it, it is a class decorator. A new
    name is used when asked for and never chosen automatically; a replaced backend keeps its rank.
    ``get_name`` of a class under a new name must return that name. A decorated class is checked at
    once, a class behind a path when it is first needed.

    Args:
        name: new or existing registry name, or the alias of an existing one.
        class_path: ``package.module:Class``; None to decorate the class.
        requires: modules that must be importable, for a new name.

    Returns:
        A decorator that returns its class unchanged.

    Raises:
        ValueError: the path lacks a module or class, the name is no identifier, or ``get_name`` of
            a decorated class returns another than the new name.
        TypeError: the decorated object is no ``AttentionBackend``.
    """

    def register(path: str) -> None:
        if name in AttentionBackendEnum:
            _split(path)
            AttentionBackendEnum[name].override(path)
        else:
            AttentionBackendEnum.add(BackendRow(name, path, requires=requires))

    if class_path is not None:
        register(class_path)

    def decorate(cls: B) -> B:
        if class_path is None:
            path = f"{cls.__module__}:{cls.__qualname__}"
            _checked(cls, path, None if name in AttentionBackendEnum else name)
            register(path)
        return cls

    return decorate
