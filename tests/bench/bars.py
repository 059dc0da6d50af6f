"""What a figure is to be at least, or at most."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and what it is to be at least, or at most."""

    name: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the figure is on the right side of its bar."""
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    def row(self) -> dict[str, float | str]:
        """The bar as a line of a table."""
        bound = f">= {self.least:.4g}" if self.least is not None else f"<= {self.most:.4g}"
        return {"bar": self.name, "value": self.value, "bound": bound, "is met": "yes" if self.is_met else "NO"}
