"""Small JSON calls to our own servers, for the commands that look at a fleet."""

from __future__ import annotations

import argparse
import os
from typing import Any

import httpx

from pdplane.settings import BadSetting, env_of
from pdplane.worker.config import WorkerConfig

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY = "PDPLANE_API_KEY"
START_IT = "Start it with `pdplane up`, or give --url"
NAME_THE_WORKER = "give a worker's own URL, as `pdplane status` shows it"
ADMIN_KEY = env_of(WorkerConfig, "admin_key")


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """--url and --api-key, alike for every command that asks a router."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the router [{DEFAULT_URL}]")
    parser.add_argument(
        "--api-key", default=os.environ.get(API_KEY, ""), help=f"the router's key, where it asks for one [${API_KEY}]"
    )


def add_admin_arguments(parser: argparse.ArgumentParser) -> None:
    """--admin-key, alike for every verb that a worker takes from its operator."""
    parser.add_argument(
        "--admin-key",
        default=os.environ.get(ADMIN_KEY, ""),
        help=f"the worker's --admin-key; needed from another machine than its own [${ADMIN_KEY}]",
    )


def client(url: str, api_key: str = "", timeout_s: float = 10.0) -> httpx.Client:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)


def get(http: httpx.Client, path: str) -> tuple[int, Any]:
    """(status, JSON). Raises BadSetting where nobody answers, naming the address."""
    return _ask(http, "GET", path, None, START_IT)


def say(worker: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST an operator's verb to a worker; its answer. Raises BadSetting where nobody answers or it is refused."""
    status, told = _ask(worker, "POST", path, body, NAME_THE_WORKER)
    if status == 200 and isinstance(told, dict):
        return told
    if status in (404, 405):
        raise BadSetting(f"{worker.base_url} has no {path}: it is a router, or no worker of ours; {NAME_THE_WORKER}")
    error = told.get("error") if isinstance(told, dict) else None
    raise BadSetting(f"{worker.base_url} refused ({status}): {(error or {}).get('message', told)}")


def _ask(http: httpx.Client, method: str, path: str, body: dict[str, Any] | None, remedy: str) -> tuple[int, Any]:
    try:
        answer = http.request(method, path, json=body)
        return answer.status_code, answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(http, error, remedy) from None
    except ValueError:
        raise BadSetting(f"{http.base_url}{path.lstrip('/')} did not answer with JSON: is it ours?") from None


def unreachable(http: httpx.Client, error: Exception, remedy: str = START_IT) -> BadSetting:
    reason = str(error) or type(error).__name__
    return BadSetting(f"nobody answers at {http.base_url} ({reason}); is it up? {remedy[:1].upper()}{remedy[1:]}")
