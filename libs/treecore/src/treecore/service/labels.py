"""Label values that others choose, kept few: each value is a series for ever."""

OTHER = "other"


class FewLabels:
    """The first `most` values keep their names, all that come later share one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, value: str) -> str:
        """The label's value for `value`."""
        if value in self._known:
            return value
        if not value or len(self._known) >= self._most:
            return OTHER
        self._known.add(value)
        return value
