"""What an error says about a request: whether the provider refused it, or may have served it."""

from collections.abc import Iterator

_REFUSED = range(400, 600)
"""The HTTP statuses of a request that was not served."""

_HAS_STATUS_AS_CODE = {"APIError", "GoogleAPICallError", "HTTPError"}
"""Errors whose `code` is an HTTP status: Google's and `urllib`'s. In other errors it is not."""

_CUT_OFF = (
    *("Timeout", "TimeoutError", "TimeoutException", "DeadlineExceeded"),
    *("ConnectionError", "ConnectionClosed", "ConnectionClosedError", "ProtocolError", "EOFError"),
    *("ReadError", "WriteError", "CloseError", "IncompleteRead", "IncompleteReadError"),
    *("ChunkedEncodingError", "PayloadError", "ResponseStreamingError"),
    *("JSONDecodeError", "ResponseValidationError", "FinishReasonError"),
)
"""The ends of the names of errors after which a provider may have served the request."""

_NOT_CONNECTED = {
    *("ConnectError", "ConnectTimeout", "ConnectTimeoutError", "ConnectionRefusedError"),
    *("ClientConnectorError", "EndpointConnectionError", "NewConnectionError", "PoolTimeout"),
    "gaierror",
}
"""Errors before anything is sent."""

_STOPPED = {"CancelledError", "GeneratorExit", "KeyboardInterrupt"}
"""The exceptions that end a run whose caller no longer waits."""


def is_paid(error: BaseException) -> bool:
    """Whether the provider may have served a request that has failed."""
    chain = [*_chain(error)]
    names = set[str]().union(*map(_names, chain))
    if any(map(_refuses, chain)) or names & _NOT_CONNECTED:
        return False
    return bool(names & _STOPPED) or any(name.endswith(_CUT_OFF) for name in names)


def _refuses(error: BaseException) -> bool:
    """Whether an error has the status of a provider's refusal."""
    response, names = getattr(error, "response", None), _names(error)
    found = [getattr(error, "status_code", None), getattr(response, "status_code", None)]
    # Google's client gives the status 504 to a call for which it no longer waits.
    if names & _HAS_STATUS_AS_CODE and "DeadlineExceeded" not in names:
        found.append(getattr(error, "code", None))
    return any(isinstance(status, int) and status in _REFUSED for status in found)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes, without earlier handled errors, such as an SDK's first attempts."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _names(error: BaseException) -> set[str]:
    """The names of an error's class and of its base classes."""
    return {kind.__name__ for kind in type(error).__mro__}
