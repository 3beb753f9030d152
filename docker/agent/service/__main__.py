"""Run the service: `python -m service`."""

import logging
import signal
import sys

import uvicorn
from pydantic import ValidationError

from service.settings import Settings


def main() -> None:
    """Serve until a signal; the exit code is 2 if the settings are wrong."""
    try:
        settings = Settings()  # type: ignore[call-arg]  # from the environment
    except ValidationError as wrong:
        for error in wrong.errors():
            # The message has no value of a variable, which may be secret, but for a model's name.
            message = " ".join(error["msg"].split())
            sys.stderr.write(f"{str(error['loc'][0]).upper()} is wrong: {message}\n")
        sys.exit(2)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if settings.workers > 1 and not settings.langchain_quota_redis_url:
        logging.getLogger("service").warning(
            "each of %d workers counts for itself: set LANGCHAIN_QUOTA_REDIS_URL", settings.workers
        )
    # When it has shut down, uvicorn raises the signal again. The exit code of a stop is 0.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    uvicorn.run(
        "service.app:app",
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        timeout_graceful_shutdown=settings.shutdown_seconds,
        lifespan="on",
    )


if __name__ == "__main__":
    main()
