"""What a shell offers when Tab is pressed (`protofed --install-completion`)."""

from collections.abc import Callable, Iterable

from protofed.data import available
from protofed.engines import ENGINES
from protofed.inference import FORMATS
from protofed.metrics import CHOICES
from protofed.models import model_names
from protofed.registry import method_names
from protofed.studies.tables.preset import preset_names

Offer = Callable[[str], list[str]]


def _offer(names: Callable[[], Iterable[str]]) -> Offer:
    def offer(incomplete: str) -> list[str]:
        """The names that begin so."""
        return [name for name in names() if name.startswith(incomplete)]

    return offer


methods = _offer(method_names)
data = _offer(lambda: (info.name for info in available()))
models = _offer(model_names)
tables = _offer(preset_names)
formats = _offer(lambda: FORMATS)

OPTIONS: dict[str, Offer] = {
    "data": data,
    "model": models,
    "engine": _offer(lambda: ENGINES),
    "metric": _offer(lambda: CHOICES),
}
"""For options that every run has."""
