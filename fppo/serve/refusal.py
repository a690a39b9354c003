"""Requests that are refused, by either protocol."""


class Refusal(Exception):
    """A request that is refused: the message and the status of its response. OpenAI's protocol also names the parameter
    that is wrong, and a code."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
