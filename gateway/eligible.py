"""Which backends of a pool a request may use: those that serve its model, in the regions that its tenant allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.backend import Backend

Names = frozenset[str]


class Eligible:
    """Of one pool. The answers are kept until something changes: most requests cost two look-ups."""

    def __init__(self) -> None:
        self.models: dict[str, Names] = {}  # what each backend says that it serves; absent: anything
        self.wanted: Mapping[str, str] = {}  # by label, what the backends call a model; absent: anything
        self._regions: dict[str, str | None] = {}
        self._answers: dict[tuple[str, tuple[str, ...]], Names | None] = {}

    def __repr__(self) -> str:
        return f"<Eligible {len(self.models)}/{len(self._regions)} backends say what they serve>"

    def want(self, wanted: Mapping[str, str]) -> None:
        """These are the pool's models, by label."""
        self.wanted = wanted
        self._answers.clear()

    def observe(self, backends: Iterable[Backend]) -> None:
        """These are the backends now."""
        self._regions = {backend.name: backend.region for backend in backends}
        self.models = {name: models for name, models in self.models.items() if name in self._regions}
        self._answers.clear()

    def serves(self, backend: str, models: Names | None) -> bool:
        """What a backend says that it serves; None: it does not say. Returns whether that is news."""
        if self.models.get(backend) == models:
            return False
        self.models.pop(backend, None)
        if models is not None:
            self.models[backend] = models
        self._answers.clear()
        return True

    def lacks(self, backend: str) -> list[str]:
        """The pool's models that a backend does not serve."""
        models = self.models.get(backend)
        return [] if models is None else [name for name in self.wanted.values() if name not in models]

    def backends(self, label: str, residency: tuple[str, ...]) -> Names | None:
        """The names of those that may be used; None: all."""
        key = (label, residency)
        if key not in self._answers:
            self._answers[key] = self._found(self.wanted.get(label), residency)
        return self._answers[key]

    def _found(self, model: str | None, residency: tuple[str, ...]) -> Names | None:
        found = frozenset(
            name
            for name, region in self._regions.items()
            if (not residency or region in residency)
            and (model is None or name not in self.models or model in self.models[name])
        )
        return None if len(found) == len(self._regions) else found
