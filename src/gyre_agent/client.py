"""Chat completions over HTTP with retries: all that the agent knows of the model."""

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

RETRIES = 8
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 10.0


class ModelError(Exception):
    """The model cannot be reached, or refuses the request for good."""


class ContextOverflow(ModelError):
    """The prompt does not fit the model."""


@dataclass
class Reply:
    """An assistant message and what it cost.

    Example: ``Reply(message={"role": "assistant", "content": "hi"}, used_tokens=14)``.
    """

    message: dict[str, Any]
    used_tokens: int
    """Prompt plus completion, as the server counts."""


class ModelClient:
    """One keep-alive connection to an OpenAI-compatible server.

    Args:
        base_url: For example ``http://127.0.0.1:8000/v1``.
        model: Name that is sent.
        timeout_s: Of one attempt.
    """

    def __init__(self, base_url: str, *, model: str = "policy", timeout_s: float = 3600.0) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path = parts.path.rstrip("/") + "/chat/completions"
        self._model = model
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def complete(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]], max_tokens: int, headers: dict[str, str]
    ) -> Reply:
        """Return the model's reply, trying again on lost connections, 429 and 5xx.

        Raises:
            ContextOverflow: The prompt does not fit.
            ModelError: Another refusal, or too many failures.
        """
        body = {"model": self._model, "messages": messages, "tools": tools, "max_tokens": max_tokens}
        data = json.dumps(body).encode()
        wait_s = FIRST_WAIT_S
        failure = ""
        for _ in range(RETRIES):
            try:
                status, text = self._post(data, headers)
            except (OSError, http.client.HTTPException) as error:
                failure = f"{type(error).__name__}: {error}"
                self._close()
            else:
                if status == 200:
                    return _reply(text)
                failure = f"status {status}: {text[:300]!r}"
                if b"context_length_exceeded" in text:
                    raise ContextOverflow(failure)
                if status not in (408, 409, 429) and status < 500:
                    raise ModelError(failure)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        raise ModelError(f"gave up after {RETRIES} attempts, last {failure}")

    def _post(self, data: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        self._connection.request("POST", self._path, data, {"content-type": "application/json", **headers})
        response = self._connection.getresponse()
        return response.status, response.read()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _reply(text: bytes) -> Reply:
    body = json.loads(text)
    usage = body.get("usage") or {}
    used = int(usage.get("prompt_tokens", 0)) + int(usage.get("completion_tokens", 0))
    return Reply(message=body["choices"][0]["message"], used_tokens=used)
