"""Run the service: `python -m service`."""

import logging
import signal
import sys
from types import FrameType

import uvicorn

from service.agent import build_model
from service.settings import Settings, SettingsError
from service.telemetry import exporting

BAD_SETTINGS = 2


def main() -> int:
    """Serve until a signal; the exit code is 2 if the settings are wrong."""
    try:
        settings = Settings.from_environment()
        exporting()
        build_model(settings.model)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_SETTINGS
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if settings.workers > 1 and not settings.redis_url:
        logging.getLogger("service").warning(
            "each of %d workers counts for itself: set LANGCHAIN_QUOTA_REDIS_URL", settings.workers
        )
    # uvicorn raises the signal again when it has shut down.
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    uvicorn.run(
        "service.app:from_environment",
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        timeout_graceful_shutdown=settings.shutdown_seconds,
        server_header=False,
        ws="none",
        lifespan="on",
    )
    return 0


def _exit(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
