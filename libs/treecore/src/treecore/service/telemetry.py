"""Logs: a constant event plus fields. No prompt text above DEBUG, nothing per token at INFO."""

import logging
import sys


class EventFormatter(logging.Formatter):
    """`time level service event key=value ...`; fields come from `extra={"fields": {...}}`."""

    def __init__(self, service: str) -> None:
        super().__init__("%(asctime)s %(levelname)s " + service + " %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The record's line with its fields behind the event."""
        line = super().format(record)
        fields = getattr(record, "fields", None)
        return line if not fields else line + "".join(f" {key}={value}" for key, value in fields.items())


def start_logging(service: str, level: str) -> None:
    """Send all logs of this process to stderr in the one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_event(logger: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Log `event` with `fields`; the event's text never varies, so it can be searched and counted."""
    logger.log(level, event, extra={"fields": fields})
