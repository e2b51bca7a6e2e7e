"""Which backends of a pool a request may use: those that serve its model, in the regions that its tenant allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from gateway.backend import Backend

Names = frozenset[str]
Among = tuple[Names, bool] | None  # those that are named, or with False all others; None: all


class Eligible:
    """Of one pool. An answer is one set that changes when the backends do: a request that waits sees the change."""

    def __init__(self) -> None:
        self.models: dict[str, Names] = {}  # what each backend says that it serves; absent: anything
        self.wanted: Mapping[str, str] = {}  # by label, what the backends call a model; absent: anything
        self.listed: Names = frozenset()  # what any of them says
        self._regions: dict[str, str | None] = {}
        self._answers: dict[tuple[str | None, tuple[str, ...], Among], set[str] | None] = {}
        self._changed = False

    def __repr__(self) -> str:
        return f"<Eligible {len(self.models)}/{len(self._regions)} backends say what they serve>"

    def want(self, wanted: Mapping[str, str]) -> None:
        """These are the pool's models, by label."""
        self.wanted = wanted
        self._renew()

    def observe(self, backends: Iterable[Backend]) -> None:
        """These are the backends now."""
        self._regions = {backend.name: backend.region for backend in backends}
        self.models = {name: models for name, models in self.models.items() if name in self._regions}
        self._renew()

    def forget(self) -> None:
        """What they say that they serve is not known any more."""
        self.models.clear()
        self._renew()

    def serves(self, backend: str, models: Names | None) -> bool:
        """What a backend says that it serves; None: it does not say. Returns whether that is news."""
        if self.models.get(backend) == models:
            return False
        self.models.pop(backend, None)
        if models is not None:
            self.models[backend] = models
        self._renew()
        return True

    def lacks(self, backend: str) -> list[str]:
        """The pool's models that a backend does not serve."""
        models = self.models.get(backend)
        return [] if models is None else [name for name in self.wanted.values() if name not in models]

    def offered(self, residency: tuple[str, ...]) -> list[str]:
        """The models that backends in these regions say that they serve."""
        usable = self.backends("", residency)
        names = [models for backend, models in self.models.items() if usable is None or backend in usable]
        return sorted(frozenset().union(*names))

    def backends(self, label: str, residency: tuple[str, ...], among: Among = None, word: str = "") -> Set[str] | None:
        """The names of those that may be used; None: any. A backend that is not said to be anywhere is in no region.
        `word` is what a client calls a model without a label of its own: who says that it serves it may be used, or
        any where nobody does."""
        model = self.wanted.get(label) or (word if word in self.listed else None)
        key = (model, residency, among)
        if key not in self._answers:
            found = self._found(*key)
            self._answers[key] = found if residency or among or len(found) < len(self._regions) else None
        return self._answers[key]

    def changed(self) -> bool:
        """Whether any answer has changed since this was asked last: who waits by it may go elsewhere now."""
        changed, self._changed = self._changed, False
        return changed

    def _renew(self) -> None:
        self.listed = frozenset().union(*self.models.values())
        for key, names in list(self._answers.items()):
            if names is None:
                del self._answers[key]
            elif names != (found := self._found(*key)):
                self._changed = True
                names.clear()
                names.update(found)

    def _found(self, model: str | None, residency: tuple[str, ...], among: Among) -> set[str]:
        return {
            name
            for name, region in self._regions.items()
            if (not residency or region in residency)
            and (among is None or (name in among[0]) is among[1])
            and (model is None or name not in self.models or model in self.models[name])
        }
